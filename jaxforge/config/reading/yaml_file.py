"""YAML parser with limits, so that parsing a small file takes little time and memory."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from jaxforge.config.reading import toml
from jaxforge.errors import UserError


class _Loader(yaml.SafeLoader):
    """Loader of plain YAML: no anchors, which multiply, and no key twice."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401
        if self.check_event(yaml.AliasEvent):
            problem = "anchors and aliases are not supported"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        for number, name in enumerate(names):
            if name in names[:number]:
                mark = node.value[number][0].start_mark
                raise yaml.MarkedYAMLError(problem=f"{name} occurs twice", problem_mark=mark)
        return super().construct_mapping(node, deep)


def parse(text: str, path: Path) -> Any:  # noqa: ANN401 (validated by the caller)
    """Parse a document.

    Args:
        text: the document.
        path: its file, for messages.

    Raises:
        UserError: the document is not valid YAML, or exceeds a limit.
    """
    if len(text) > toml.SIZE:
        raise UserError(f"{path}: {len(text):,} characters; a config has at most {toml.SIZE:,}")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{path}: not valid YAML: {str(error) or 'nested too deep'}") from None
