"""Resolution of a config for the devices of the job."""

import jax

from jaxforge.config import elastic, rules
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.data.epoch import sequences_per_epoch
from jaxforge.parallel import agreement, compilation
from jaxforge.runs import job_facts, run_directory
from jaxforge.training.health.watchdog import Watchdog


def resolve(config: JobConfig | UnresolvedConfig, watchdog: Watchdog) -> JobConfig:
    """Return the config with all lengths in updates, once all processes agree on it.

    Raises:
        UserError: processes have different configs, the run was moved, or the config breaks a rule.
    """
    agreement.check(job_facts.facts_of_start(config) if jax.process_count() > 1 else {})
    known = config.known if isinstance(config, UnresolvedConfig) else config
    n_devices = elastic.full_devices(known, jax.device_count(), jax.process_count())
    if isinstance(config, UnresolvedConfig):
        run_directory.check_not_moved(config)
        with watchdog.section("data"):  # for lengths in epochs
            config = config.resolve(n_devices, sequences_per_epoch)
    elastic.check_shrinkable(config, n_devices)
    config = elastic.shrink(config, n_devices, jax.device_count())
    rules.check(config, jax.device_count())
    compilation.use_cache(config.train)
    return config
