"""Supervision of commands: processes, restarts, and hosts that leave and join a job."""
