"""Metrics in MLflow."""

from collections.abc import Sequence

from jaxforge.cli.redaction import redacted_value
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.telemetry.sinks import Metrics, Sample, finite_numbers

_TAG = "jaxforge.run_id"
_LONGEST = 500  # characters of a parameter that every MLflow store takes
_PARAMS_AT_ONCE = 100  # MLflow's limit for one request


class MlflowSink:
    """One run in MLflow, continued by every restart; the axis is the step.

    Metrics of a list, such as tokens per expert, become one metric for each element. Numbers that
    are not finite are left out. MLflow's environment variables apply.

    Args:
        config: the run's config, whose settings become parameters of the run.
        run_id: identifier of the run, stored as the tag `jaxforge.run_id`.

    Raises:
        UserError: MLflow cannot use the store, the server refuses the experiment, or the run does
            not exist.
    """

    def __init__(self, config: JobConfig, run_id: str) -> None:
        from mlflow.entities import ViewType
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        settings = config.metrics.required_writer("mlflow")
        try:
            self._client = MlflowClient(tracking_uri=settings.location)
            name = settings.project
            known = self._client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self._client.create_experiment(name)
            if settings.run_id:
                run = self._client.get_run(settings.run_id)
            else:
                ours = self._client.search_runs(
                    [experiment], f"tags.`{_TAG}` = '{run_id}'", ViewType.ACTIVE_ONLY, 1
                )
                run = next(iter(ours), None) or self._client.create_run(
                    experiment, tags={_TAG: run_id}, run_name=settings.run_name
                )
        except (MlflowException, ImportError) as error:
            raise UserError(
                f"mlflow in metrics.writers: MLflow refuses: {error}. Set "
                "its location to the address of a server, or to a file such as "
                "\"sqlite:///mlflow.db\", which needs pip install 'jaxforge[mlflow]'"
            ) from error
        self.run_id: str = run.info.run_id
        self._client.update_run(self.run_id, status="RUNNING")
        self._log_settings(config, set(run.data.params))

    def _log_settings(self, config: JobConfig, known: set[str]) -> None:
        """Log the settings of a run that has none; MLflow does not change parameters later."""
        from mlflow.entities import Param

        values = redacted_value(config.model_dump(mode="json"))
        params = [
            Param(f"{section}.{key}", str(value)[:_LONGEST])
            for section, table in values.items()
            for key, value in table.items()
            if f"{section}.{key}" not in known
        ]
        for start in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self.run_id, params=params[start : start + _PARAMS_AT_ONCE])

    def write(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step or of an evaluation in one request."""
        import time

        from mlflow.entities import Metric

        milliseconds = round(time.time() * 1000)
        points = [
            Metric(name, x, milliseconds, step) for name, x in finite_numbers(metrics).items()
        ]
        self._client.log_batch(self.run_id, metrics=points)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Store the samples of a step as a JSON artifact."""
        rows = [sample._asdict() for sample in samples]
        self._client.log_dict(self.run_id, {"samples": rows}, f"samples/step_{step}.json")

    def rewind(self, step: int) -> None:
        """Do nothing: MLflow keeps every point, and plots those of a step in the order of time."""

    def close(self, exit_code: int) -> None:
        """End the run in MLflow as finished or failed."""
        self._client.set_terminated(self.run_id, "FAILED" if exit_code else "FINISHED")
