"""Check programs of users by mypy and pyright, both strict: those in this folder, and README's.

`make check` runs it, with the Python in whose environment hpcdist and the checkers are.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
README = HERE / "build" / "readme.py"

# A page shows what matters, so it leaves annotations out; all else is strict.
HEADER = """\
# mypy: allow-untyped-defs, disable-error-code=var-annotated
# pyright: standard, reportMissingImports=false
"""


def examples(page: str) -> str:
    """Return the Python of a page as one program."""
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S))


def main() -> int:
    README.parent.mkdir(exist_ok=True)
    README.write_text(HEADER + examples((ROOT / "README.md").read_text()))
    programs = [path for path in sorted(HERE.rglob("*.py")) if path != Path(__file__)]
    cache = ROOT / ".mypy_cache" / "typing"
    checks: list[list[str | Path]] = [
        ["mypy", "--config-file", HERE / "mypy.ini", "--cache-dir", cache, *programs],
        ["pyright", "--pythonpath", sys.executable, "--project", HERE],
    ]
    return max([subprocess.call([sys.executable, "-m", *check], cwd=ROOT) for check in checks])


if __name__ == "__main__":
    sys.exit(main())
