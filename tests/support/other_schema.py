"""The command line as a release of another schema version has it.

`python other_schema.py 1 work …` is a release from before inputs by reference: it reads
version 1 alone. `… 3 …` is the next release: it reads version 3 and stamps every
request with it, with a field that only it knows, so that whoever is older has to leave
those requests alone.
"""

import os
import sys
from pathlib import Path

NEXT_FIELD = "since_three"


def become(version: int) -> None:
    """Makes this process a release of another version, before it reads any module."""
    import msgspec

    from tokenmill.shared import messages

    messages.SCHEMA_VERSION = version
    if version >= 3:
        current = messages.encode

        def encode(message: object) -> bytes:
            raw = current(message)
            if type(message).__name__ != "JobRequest":
                return raw
            plain = msgspec.json.decode(raw) | {"v": version, NEXT_FIELD: True}
            return msgspec.json.encode(plain)

        messages.encode = encode


def main() -> None:
    """Runs the command line with what follows the version."""
    source = Path(__file__).parents[2] / "src"
    sys.path.insert(0, os.environ.get("TOKENMILL_TEST_SOURCE", str(source)))
    become(int(sys.argv[1]))
    from tokenmill.__main__ import main as run

    sys.argv = ["tokenmill", *sys.argv[2:]]
    sys.exit(run())


if __name__ == "__main__":
    main()
