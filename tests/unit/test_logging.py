"""Log lines: JSON off a terminal, and nothing private at info."""

import io
import json
import logging

import pytest
import structlog

from tokenmill.shared.config import LogConfig
from tokenmill.shared.logging import configure


@pytest.fixture
def restored() -> None:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root = logging.getLogger()
    for handler in list(root.handlers):
        if type(handler).__module__ == "tokenmill.shared.logging":
            root.removeHandler(handler)


@pytest.fixture
def stream(restored) -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_off_a_terminal_a_line_is_json_with_the_process(stream) -> None:
    configure(LogConfig(), "worker", stream)
    structlog.get_logger().info("job", tokens=3)
    (line,) = lines(stream)
    assert line["event"] == "job"
    assert line["tokens"] == 3
    assert line["process"] == "worker"
    assert line["level"] == "info"
    assert line["timestamp"].endswith("Z")


def test_prompt_text_is_not_logged_at_info(stream) -> None:
    configure(LogConfig(level="debug"), "worker", stream)
    log = structlog.get_logger()
    log.info("job", text="a secret", prompt="a secret", messages=["a secret"])
    log.debug("job", text="a secret")
    at_info, at_debug = lines(stream)
    assert "a secret" not in json.dumps(at_info)
    assert at_debug["text"] == "a secret"


def test_the_level_is_a_bound(stream) -> None:
    configure(LogConfig(level="warning"), "worker", stream)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines(stream)] == ["loud"]


def test_exceptions_are_fields_not_loose_lines(stream) -> None:
    configure(LogConfig(), "worker", stream)
    try:
        raise ValueError("broken")
    except ValueError as error:
        structlog.get_logger().error("failed", exc_info=error)
    (line,) = lines(stream)
    assert "ValueError: broken" in line["exception"]


def test_an_exception_shows_no_local_variable_to_people(stream) -> None:
    configure(LogConfig(format="console"), "worker", stream)

    def fails(secret: str) -> None:
        raise ValueError("broken")

    try:
        fails("hid" + "den")
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "ValueError: broken" in stream.getvalue()
    assert "hidden" not in stream.getvalue()


def test_warnings_of_libraries_come_along_once(stream) -> None:
    configure(LogConfig(), "worker", stream)
    configure(LogConfig(), "worker", stream)
    logging.getLogger("somebody").warning("watch %s", "out")
    logging.getLogger("somebody").info("never mind")
    (line,) = lines(stream)
    assert line["library"] == "somebody"
    assert line["message"] == "watch out"


def test_the_console_format_is_for_people(stream) -> None:
    configure(LogConfig(format="console"), "worker", stream)
    structlog.get_logger().info("job", tokens=3)
    assert "tokens=3" in stream.getvalue()
    assert not stream.getvalue().startswith("{")
