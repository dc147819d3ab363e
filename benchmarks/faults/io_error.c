/* Preloaded library that lets reads and writes of chosen files fail with EIO.

   IO_ERROR_PATH       pattern of fnmatch for absolute paths
   IO_ERROR_OPERATION  "read" or "write" (which includes fsync)
   IO_ERROR_WHILE      file that must exist for a call to fail
   IO_ERROR_MARK       file that is created when a call fails

   Mapped pages are out of its reach. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int fails(int fd, const char *operation)
{
    const char *pattern = getenv("IO_ERROR_PATH"), *armed = getenv("IO_ERROR_WHILE");
    char link[64], path[PATH_MAX + 1];
    int before = errno;
    if (!pattern || !armed || strcmp(getenv("IO_ERROR_OPERATION"), operation))
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX);
    if (length >= 0) {
        path[length] = 0;
        if (!fnmatch(pattern, path, 0) && !access(armed, F_OK)) {
            close(open(getenv("IO_ERROR_MARK"), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
            errno = EIO;
            return 1;
        }
    }
    errno = before;
    return 0;
}

#define REPLACE(type, name, operation, parameters, arguments)                                      \
    type name parameters                                                                           \
    {                                                                                              \
        static type(*next) parameters;                                                             \
        if (!next)                                                                                 \
            next = (type(*) parameters)dlsym(RTLD_NEXT, #name);                                    \
        return fails(fd, operation) ? -1 : next arguments;                                         \
    }

REPLACE(ssize_t, read, "read", (int fd, void *data, size_t n), (fd, data, n))
REPLACE(ssize_t, pread, "read", (int fd, void *data, size_t n, off_t at), (fd, data, n, at))
REPLACE(ssize_t, pread64, "read", (int fd, void *data, size_t n, off64_t at), (fd, data, n, at))
REPLACE(ssize_t, readv, "read", (int fd, const struct iovec *data, int n), (fd, data, n))
REPLACE(ssize_t, write, "write", (int fd, const void *data, size_t n), (fd, data, n))
REPLACE(ssize_t, pwrite, "write", (int fd, const void *data, size_t n, off_t at), (fd, data, n, at))
REPLACE(ssize_t, pwrite64, "write", (int fd, const void *data, size_t n, off64_t at),
        (fd, data, n, at))
REPLACE(ssize_t, writev, "write", (int fd, const struct iovec *data, int n), (fd, data, n))
REPLACE(int, fsync, "write", (int fd), (fd))
REPLACE(int, fdatasync, "write", (int fd), (fd))
