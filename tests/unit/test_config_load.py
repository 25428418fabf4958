"""Settings: where they come from, and what is said when one is wrong."""

from pathlib import Path

import pytest

from tokenmill.shared.config import Config, TenantConfig
from tokenmill.shared.config_load import load_config
from tokenmill.shared.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "pool.toml"
    path.write_text(text)
    return path


def test_without_a_file_the_defaults_are_in_force(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_config(None, {})
    assert loaded.config == Config()
    assert {origin for _, _, origin in loaded.rows()} == {"default"}


def test_a_file_is_read_and_a_variable_goes_over_it(tmp_path) -> None:
    path = write(tmp_path, "[worker]\nmax_running = 4\nemit_ms = 10\n")
    loaded = load_config(path, {"TOKENMILL_WORKER_EMIT_MS": "20"})
    assert loaded.config.worker.max_running == 4
    assert loaded.config.worker.emit_ms == 20
    assert loaded.origins["worker.max_running"] == str(path)
    assert loaded.origins["worker.emit_ms"] == "TOKENMILL_WORKER_EMIT_MS"


def test_tokenmill_toml_in_the_current_directory_is_found(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "tokenmill.toml").write_text("[log]\nlevel = 'debug'\n")
    monkeypatch.chdir(tmp_path)
    assert load_config(None, {}).config.log.level == "debug"


def test_the_variable_names_another_file(tmp_path, monkeypatch) -> None:
    (tmp_path / "tokenmill.toml").write_text("[log]\nlevel = 'debug'\n")
    monkeypatch.chdir(tmp_path)
    other = write(tmp_path, "[log]\nlevel = 'error'\n")
    loaded = load_config(None, {"TOKENMILL_CONFIG": str(other)})
    assert loaded.config.log.level == "error"


@pytest.mark.parametrize(
    ("name", "text", "section", "field", "value"),
    [
        ("POOL_BUCKETS", "64, 256", "pool", "buckets", (64, 256)),
        ("WORKER_NUM_BLOCKS", "77", "worker", "num_blocks", 77),
        ("WORKER_NUM_BLOCKS", "null", "worker", "num_blocks", None),
        ("WORKER_DRAIN_S", "2.5", "worker", "drain_s", 2.5),
        ("WORKER_DEVICE", "cpu", "worker", "device", "cpu"),
        ("REDIS_URL", "redis://h:1/2", "redis", "url", "redis://h:1/2"),
    ],
)
def test_variables_are_read_by_type(name, text, section, field, value) -> None:
    config = load_config(None, {f"TOKENMILL_{name}": text}).config
    assert getattr(getattr(config, section), field) == value


def test_models_come_from_tables_or_from_a_variable(tmp_path) -> None:
    path = write(
        tmp_path, "[[models]]\nname = 'a'\nreplicas = 2\n[[models]]\nname = 'b'\n"
    )
    models = load_config(path, {}).config.models
    assert [(m.name, m.replicas) for m in models] == [("a", 2), ("b", 1)]
    by_names = load_config(None, {"TOKENMILL_MODELS": "x, y"}).config.models
    assert [m.name for m in by_names] == ["x", "y"]
    as_json = load_config(
        None, {"TOKENMILL_MODELS": '[{"name": "z", "kv": "float32"}]'}
    ).config.models
    assert (as_json[0].name, as_json[0].kv) == ("z", "float32")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[worker]\nmax_runing = 4\n", "worker.max_runing"),
        ("[wroker]\nmax_running = 4\n", "wroker"),
        ("[worker]\nmax_running = 'four'\n", "worker.max_running"),
        ("[worker]\nmax_running = 0\n", "worker.max_running"),
        ("[worker]\nlease_ms = 10\n", "worker.lease_ms"),
        ("[pool]\nbuckets = [512, 128]\n", "pool.buckets"),
        ("[redis]\nurl = 'http://x'\n", "redis.url"),
        ("[[models]]\nname = 'a b'\n", "models[0].name"),
        ("[[models]]\nname = 'a'\n[[models]]\nname = 'a'\n", "models[1].name"),
        ("[[models]]\nweights = 'int3'\n", "models[0].weights"),
        ("models = []\n", "models"),
        ("[worker\n", "config"),
    ],
)
def test_a_wrong_setting_names_its_key_and_file(tmp_path, text, key) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, {})
    assert caught.value.key == key
    assert caught.value.origin == str(path)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "name", ["TOKENMILL_WORKER_FOO", "TOKENMILL_WROKER_LEASE_MS", "TOKENMILL_X"]
)
def test_an_unknown_variable_is_an_error_that_names_it(name) -> None:
    with pytest.raises(ConfigError, match=name):
        load_config(None, {name: "1"})


@pytest.mark.parametrize(
    ("name", "key"), [("TOKENMILL_FOO", "foo"), ("TOKENMILL_WORKER", "worker")]
)
def test_a_variable_without_a_field_is_named_without_a_dot(name, key) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {name: "1"})
    assert caught.value.key == key


def test_variables_of_other_purposes_are_left_alone() -> None:
    environ = {"TOKENMILL_URL": "x", "TOKENMILL_TEST_A": "1", "OTHER": "2"}
    assert load_config(None, environ).config == Config()


def test_a_choice_lists_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="debug, info, warning, error"):
        load_config(None, {"TOKENMILL_LOG_LEVEL": "loud"})


def test_a_missing_file_that_was_asked_for_is_an_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "nowhere.toml", {})


def test_passwords_are_not_shown() -> None:
    url = "redis://user:s3cret@host:1/0"
    loaded = load_config(None, {"TOKENMILL_REDIS_URL": url})
    assert loaded.config.redis.url == url
    shown = {key: value for key, value, _ in loaded.rows()}["redis.url"]
    assert "s3cret" not in str(shown)
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"TOKENMILL_REDIS_URL": "http://user:s3cret@host"})
    assert "s3cret" not in str(caught.value)


def test_tenants_have_tables_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text(
        "[tenants.acme]\nweight = 2\nwaiting_jobs = 10\n"
        '[tenants."a@b.c"]\ntokens_per_minute = 5000\n'
    )
    loaded = load_config(file, {})
    acme, other = loaded.config.tenants["acme"], loaded.config.tenants["a@b.c"]
    assert (acme.weight, acme.waiting_jobs, acme.waiting_tokens) == (2.0, 10, None)
    assert (other.weight, other.tokens_per_minute) == (1.0, 5000)
    assert ("tenants.acme.waiting_jobs", 10, str(file)) in loaded.rows()
    assert ("tenants.acme.waiting_tokens", None, "default") in loaded.rows()
    text = '{"acme": {"weight": 3}}'
    assert load_config(file, {"TOKENMILL_TENANTS": text}).config.tenants == {
        "acme": TenantConfig(weight=3.0)
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenants.acme]\nweigth = 1", "tenants.acme.weigth"),
        ("[tenants.acme]\nweight = 0", "tenants.acme.weight"),
        ("[tenants.acme]\nwaiting_jobs = 'x'", "tenants.acme.waiting_jobs"),
        ('[tenants."a b"]\nweight = 1', "'a b' cannot be a tenant"),
        ("tenants = 3", "expected tables"),
        ("[tenants]\nacme = 3", "tenants.acme"),
    ],
)
def test_a_wrong_tenant_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "t.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(file, {})
    with pytest.raises(ConfigError, match="TOKENMILL_TENANTS"):
        load_config(None, {"TOKENMILL_TENANTS": "{"})
