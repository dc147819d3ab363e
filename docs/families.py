"""Write the table of docs/torch_compat.md from the families: `python docs/families.py`."""

from pathlib import Path

from torch_compat.families import FAMILIES

PAGE = Path(__file__).with_name("torch_compat.md")
HEAD = "| dialect | models and their special features |\n|---|---|\n"


def page() -> str:
    """Return the page with a row for each family, in the order in which exports try them."""
    before, _, after = PAGE.read_text(encoding="utf-8").partition(HEAD)
    rows = "".join(
        f"| `{family.dialect.name}` | {family.summary} |\n" for family in FAMILIES.values()
    )
    return before + HEAD + rows + "\n" + after.partition("\n\n")[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
