"""Options of `tokenmill models add`: what is no device, and what is said of it."""

import pytest

from tokenmill.producer.models.cli_describing import config_of, read_devices
from tokenmill.shared.errors import ConfigError


@pytest.mark.parametrize("given", ["tpu", "cuda", "", "-1", "1.0", "0,1", "9" * 5000])
def test_what_is_no_number_of_a_device_is_told_which_are(given: str) -> None:
    with pytest.raises(ConfigError, match="as nvidia-smi counts them, as --device 0"):
        read_devices(["0", given])


def test_devices_are_those_of_the_version() -> None:
    config = config_of("m", "v2", {"devices": read_devices(["0", "1"]), "kv": None})
    assert (config.devices, config.version) == ((0, 1), "v2")
