"""Builders by name: what keys such as `optimizer.name` choose among, yours as well as ours."""

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from jaxforge.cli.suggestions import hint
from jaxforge.errors import UserError

Builder = TypeVar("Builder", bound=Callable[..., Any])

REGISTRATION_HINT = (
    "; for a name of your own, name the module that registers it (--plugins.modules=MODULE), or "
    "give --trust-plugins if you trust the module that the run names"
)
"""What to do about a name that no imported module has registered."""


class Registry:
    """The names that a key of the configuration may have, and what builds what they stand for.

    In a section, `name: Annotated[str, REGISTRY]` accepts these names and no others. The names of
    what comes with jaxforge are there from the start, as a config can be read without the code
    behind it; that code registers its builders just as yours does.

    Args:
        key: the key, such as "optimizer.name".
        ours: names of what comes with jaxforge.
    """

    def __init__(self, key: str, *ours: str) -> None:
        self.key, self.ours = key, ours
        self._builders: dict[str, Callable[..., Any] | None] = dict.fromkeys(ours)

    def names(self) -> tuple[str, ...]:
        """Every name, in the order in which they came."""
        return tuple(self._builders)

    def register(self, name: str) -> Callable[[Builder], Builder]:
        """Decorates what builds what `name` stands for.

        Raises:
            UserError: the name is taken.
        """

        def add(builder: Builder) -> Builder:
            if (other := self._builders.get(name)) is not None:
                raise UserError(
                    f'{self.key} = "{name}" is registered already, by {other.__module__}: choose '
                    "another name"
                )
            self._builders[name] = builder
            return builder

        return add

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """Return the builder registered as `name`.

        Raises:
            UserError: nothing of this name is registered.
        """
        builder = self._builders.get(name)
        if builder is None:
            names = self.names()
            raise UserError(
                f'{self.key} = "{name}": expected one of {", ".join(names)}{hint(name, names)}'
                f"{REGISTRATION_HINT}"
            )
        return builder

    def __get_pydantic_core_schema__(
        self,
        source: Any,  # noqa: ANN401  # a type
        handler: GetCoreSchemaHandler,
    ) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._known, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "enum": list(self.names()), "registered": True}

    def _known(self, name: str, info: ValidationInfo) -> str:
        """Refuse an unknown name, unless plugins that may register it are not imported."""
        if name not in self._builders and not (info.context or {}).get("may_be_unknown"):
            raise PydanticCustomError("unknown_name", "not a name that is registered")
        return name
