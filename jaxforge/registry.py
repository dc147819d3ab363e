"""Registries of builders by name, for keys such as `optimizer.name`."""

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
"""Advice for a name that no imported module has registered."""


class Registry:
    """Valid names of a config key, and their builders.

    In a section, `name: Annotated[str, REGISTRY]` accepts only these names. Built-in names are
    valid from the start, because a config can be read without importing their code. That code
    registers its builders in the same way as users' code does.

    Args:
        key: the key, such as "optimizer.name".
        built_in: built-in names.
        family: prefix of further names, such as "optax.", whose builder is registered for the
            prefix and checks the rest of the name; "" for none.
        joint: text that joins several names in one value; "" if a value is one name.
    """

    def __init__(self, key: str, *built_in: str, family: str = "", joint: str = "") -> None:
        self.key, self.built_in, self.family, self.joint = key, built_in, family, joint
        self._builders: dict[str, Callable[..., Any] | None] = dict.fromkeys(built_in)

    def names(self) -> tuple[str, ...]:
        """Return all names in the order of registration, without those of the family."""
        return tuple(name for name in self._builders if name != self.family)

    def register(self, name: str) -> Callable[[Builder], Builder]:
        """Return a decorator that registers a builder as `name`.

        Raises:
            UserError: the name is already registered.
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
            UserError: the name is not registered.
        """
        # One builder serves all names of a family, such as those of optax.
        is_of_family = self.family and name.startswith(self.family)
        builder = self._builders.get(self.family if is_of_family else name)
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
        # The schema lists what is registered now: plugins are imported before.
        names = {"enum": list(self.names()), "registered": True}
        return {**handler(schema), **names, **({"family": self.family} if self.family else {})}

    def _known(self, name: str, info: ValidationInfo) -> str:
        """Raise an error for an unknown name, unless plugins may still register it."""
        parts = name.split(self.joint) if self.joint else [name]
        is_known = {*parts} <= {*self.names()} or (self.family and name.startswith(self.family))
        if not is_known and not (info.context or {}).get("may_be_unknown"):
            raise PydanticCustomError("unknown_name", "not a name that is registered")
        return name
