"""docker-compose.yml and the Dockerfiles: valid, and everything they name is there."""

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from support import compose
from support.compose import ROOT

from tokenmill.__main__ import build_app
from tokenmill.shared.config_load import load_config

DOCKERFILES = ("deploy/Dockerfile", "deploy/redis/Dockerfile")
OURS = ("scheduler", "janitor", "gateway", "worker", "worker-gpu")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return compose.read(compose.passwords())["services"]


def test_it_is_valid_by_the_schema_of_the_specification(services):
    validator = jsonschema.Draft202012Validator
    schema = compose.schema()
    assert {"services", "volumes", "networks"} <= schema["properties"].keys()
    validator(schema).validate(compose.read(compose.passwords()))
    validator(schema).validate(compose.raw())
    broken = {"services": {"redis": {"imagee": "redis"}}}
    assert list(validator(schema).iter_errors(broken))


def test_the_issue_s_services_are_all_there(services):
    assert services.keys() == {
        *OURS, "redis", "mps", "prometheus", "grafana",
    }  # fmt: skip
    assert services["scheduler"]["deploy"]["replicas"] == 2


def test_passwords_has_every_variable_that_must_be_set():
    must = set(re.findall(r"\$\{(\w+)(?::\?|\})", compose.FILE.read_text("utf-8")))
    assert must == compose.passwords().keys() - {"COMPOSE_PROFILES"}
    long_enough = [v for k, v in compose.passwords().items() if k.startswith("REDIS_")]
    assert min(map(len, long_enough)) >= 32
    assert len(set(long_enough)) == len(long_enough)


@pytest.mark.parametrize("name", OURS)
def test_settings_and_command_are_known_to_us(services, name, monkeypatch):
    service = services[name]
    environment = {k: str(v) for k, v in service["environment"].items()}
    loaded = load_config(None, environment)
    assert loaded.config.metrics.host == "0.0.0.0"
    assert loaded.config.metrics.port == 9464
    role = "worker" if name.startswith("worker") else name
    assert environment["TOKENMILL_URL"].startswith(f"redis://{role}:")
    known = _commands()
    for command in (service["command"], service["healthcheck"]["test"][1:]):
        assert command[0] == "tokenmill"
        assert command[1] in known
    assert service["healthcheck"]["test"][-1] == role
    # Docker waits at least as long as a drain may take.
    drain = loaded.config.worker.drain_s if role == "worker" else 0
    assert compose.seconds(service["stop_grace_period"]) > drain + 5


def _commands() -> set[str]:
    import typer.main

    return set(typer.main.get_command(build_app()).commands)


def test_the_image_s_own_settings_are_known_too():
    text = (ROOT / "deploy/Dockerfile").read_text("utf-8")
    found = dict(re.findall(r"(TOKENMILL_\w+)=(\S+)", text))
    assert "TOKENMILL_POOL_STATE_DIR" in found
    load_config(None, found)


@pytest.mark.parametrize("name", ["worker", "worker-gpu"])
def test_what_a_worker_compiles_or_fetches_goes_to_a_volume(services, name):
    """The root is read-only and /tmp lets nothing run: Triton loads what it builds."""
    text = (ROOT / "deploy/Dockerfile").read_text("utf-8")
    found = dict(re.findall(r"(\w+_(?:CACHE_DIR|CACHE_HOME|HOME))=(\S+)", text))
    assert services[name]["read_only"] is True
    volumes = [mount.split(":")[1] for mount in services[name]["volumes"]]
    for variable in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME"):
        place = Path(found[variable])
        assert any(place.is_relative_to(volume) for volume in volumes), variable


def test_webhooks_are_signed_by_one_secret(services):
    told = {
        name: service["environment"].get("TOKENMILL_WEBHOOKS_SECRET")
        for name, service in services.items()
        if name in OURS
    }
    secret = compose.passwords()["WEBHOOKS_SECRET"]
    assert told == {**dict.fromkeys(OURS), "scheduler": secret, "janitor": secret}
    environment = {k: str(v) for k, v in services["janitor"]["environment"].items()}
    assert load_config(None, environment).config.webhooks.secret == secret


def test_paths_networks_and_volumes_exist(services):
    whole = compose.read(compose.passwords())
    for name, service in services.items():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).is_dir(), (name, source)
            else:
                assert source in whole["volumes"], (name, source)
        for network in service.get("networks", ()):
            assert network in whole["networks"], (name, network)
        for other in service.get("depends_on", ()):
            assert "healthcheck" in services[other], (name, other)
    dashboards = ROOT / "deploy/grafana/dashboards"
    assert list(dashboards.glob("*.json"))
    assert (ROOT / "deploy/prometheus/prometheus.yml").is_file()


def test_the_configurations_of_the_watchers_agree_with_the_composition(services):
    import yaml

    folder = ROOT / "deploy"
    scrape = yaml.safe_load((folder / "prometheus/prometheus.yml").read_text("utf-8"))
    text = str(scrape)
    for name in OURS:
        assert f"'{name}" in text, f"Prometheus does not scrape {name}"
    assert "9464" in text
    provisioning = folder / "grafana/provisioning"
    told = "".join(p.read_text("utf-8") for p in provisioning.rglob("*.y*ml"))
    assert "http://prometheus:9090" in told
    assert "/var/lib/grafana/dashboards" in told


def test_every_service_has_a_health_check_and_few_rights(services):
    for name, service in services.items():
        assert service["healthcheck"]["test"], name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service["restart"] == "unless-stopped", name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} listens beyond this host"
    for name in OURS:
        assert services[name]["read_only"] is True


def test_grafana_cannot_reach_redis(services):
    reach = {name: set(s.get("networks", ())) for name, s in services.items()}
    assert not reach["grafana"] & reach["redis"]
    assert not reach["prometheus"] & reach["redis"]


def test_workers_of_a_gpu_share_mps_by_ipc_pipes_and_user(services):
    worker, mps = services["worker-gpu"], services["mps"]
    assert worker["profiles"] == mps["profiles"] == ["gpu"]
    assert services["worker"]["profiles"] == ["cpu"]
    assert worker["image"] == mps["image"]  # one image, so one user
    assert mps["ipc"] == "shareable"
    assert worker["ipc"] == "service:mps"
    pipes = mps["environment"]["CUDA_MPS_PIPE_DIRECTORY"]
    assert worker["environment"]["CUDA_MPS_PIPE_DIRECTORY"] == pipes
    for service in (worker, mps):
        assert f"mps:{pipes}" in service["volumes"]
        devices = service["deploy"]["resources"]["reservations"]["devices"]
        assert devices[0]["capabilities"] == ["gpu"]
    assert worker["depends_on"]["mps"]["condition"] == "service_healthy"


def _stages(path: str) -> dict[str, list[list[str]]]:
    """The instructions of each stage, its FROM first; continuation lines joined."""
    text = (ROOT / path).read_text("utf-8").replace("\\\n", " ")
    stages: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words[0] == "FROM":
            name = words[3] if len(words) > 2 else "final"
            current = stages.setdefault(name, [])
        elif not stages:
            continue  # an ARG before the first stage
        current.append(words)
    return stages


def _user(stages: dict[str, list[list[str]]], name: str) -> str:
    """The user that a stage ends with, its bases' where it names none."""
    users = [words[1] for words in stages[name] if words[0] == "USER"]
    base = stages[name][0][1]
    if users:
        return users[-1]
    return _user(stages, base) if base in stages else "root"


def test_targets_exist_and_none_runs_as_root(services):
    for name, service in services.items():
        build = service.get("build")
        if build is None:
            continue
        if isinstance(build, str):
            path, target = f"{build}/Dockerfile", "final"
        else:
            path, target = build["dockerfile"], build["target"]
        assert path in DOCKERFILES
        stages = _stages(path)
        assert target in stages, (name, target)
        assert _user(stages, target) not in ("root", "0"), name


@pytest.mark.parametrize("path", DOCKERFILES)
def test_what_a_dockerfile_copies_is_there_and_not_ignored(path):
    stages = _stages(path)
    context = ROOT if path == "deploy/Dockerfile" else (ROOT / path).parent
    kept = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    for words in (w for instructions in stages.values() for w in instructions):
        if words[0] != "COPY":
            continue
        sources = [w for w in words[1:-1] if not w.startswith("--")]
        stage = next((w[7:] for w in words if w.startswith("--from=")), None)
        if stage is not None:
            assert stage in stages
            continue
        for source in sources:
            assert (context / source).exists(), source
            assert context != ROOT or f"!{source}" in kept, f"{source} is ignored"


def test_the_links_of_the_package_are_copied_with_what_they_point_to():
    copied = (ROOT / "deploy/Dockerfile").read_text("utf-8")
    found = (ROOT / "src/tokenmill").iterdir()
    links = [path for path in found if path.name != "__pycache__"]
    assert links
    for link in links:
        target = Path(link.readlink()).name
        assert re.search(rf"^COPY .*\b{re.escape(target)}\b", copied, re.M), target


def test_images_are_pinned_to_a_patch_version(services):
    images = [s["image"] for s in services.values() if "build" not in s]
    for path in DOCKERFILES:
        text = (ROOT / path).read_text("utf-8")
        images += re.findall(r"^FROM ([a-z/]+:[^\s$]+)", text, re.M)
    text = (ROOT / DOCKERFILES[0]).read_text("utf-8")
    images += [f"python:{tag}" for tag in re.findall(r"^ARG PYTHON=(\S+)", text, re.M)]
    assert len(images) == 4
    for image in images:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image


def test_extras_and_packages_that_images_install_exist():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    text = (ROOT / "deploy/Dockerfile").read_text("utf-8")
    for extras in re.findall(r"'\.\[([\w,]+)\]'", text):
        for extra in extras.split(","):
            assert extra in project["optional-dependencies"], extra
    torch = re.findall(r"'(torch[^']+)'", text)
    assert set(torch) == {
        d for d in project["optional-dependencies"]["worker"] if d.startswith("torch")
    }
