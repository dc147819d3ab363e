"""Pipeline parallelism: schedules as tables, and the one program that runs them."""
