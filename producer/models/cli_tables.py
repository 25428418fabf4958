"""How versions and the comparison of copies are shown to people."""

from collections.abc import Mapping, Sequence
from typing import Final

from ...shared.shadow_report import SKIPPED, ShadowReport, SideLatency
from ..cli_output import print_facts, print_note, print_table
from .info import VersionInfo, where_not

HEADER: Final = (
    *("MODEL", "VERSION", "STATE", "SHARE", "WORKERS", "RUNNING", "WEIGHTS"),
    *("HEALTH", "COPIES"),
)
SPARE: Final = ("RUNNING", "COPIES", "WEIGHTS", "HEALTH", "MODEL")
"""What a narrow terminal goes without."""
_NAMED: Final = 5


def print_versions(found: Sequence[VersionInfo]) -> None:
    """Prints a row a version, and the reasons of those that are not well."""
    print_table(HEADER, [_row(info) for info in found], SPARE)
    for info in found:
        if info.reason:
            print_note(f"{info.model} {info.version}: {info.reason}")
        if info.failures and info.state != "failed":
            print_note(
                f"{info.model} {info.version}: {where_not(info.failures)}; `tokenmill "
                f"models load {info.model} {info.version}` tries there again"
            )
    for info in found:
        if info.share and not info.groups:
            print_note(
                f"{info.model} {info.version} has {info.share:g} % of the jobs and no "
                f"live worker; {_way_out(info, found)}"
            )
    for info in found:
        if info.unserved_adapters and info.share != 0:
            names = ", ".join(info.unserved_adapters[:_NAMED])
            print_note(
                f"{info.model} {info.version} gets jobs and cannot serve "
                f"{len(info.unserved_adapters)} adapters of the model: {names}"
                f"{' …' if len(info.unserved_adapters) > _NAMED else ''}; `tokenmill "
                f"lora list --model {info.model}` says why"
            )
    for model in sorted({info.model for info in found if info.retiring}):
        print_note(
            f"{model} retires and takes no new jobs; `tokenmill models retire {model}` "
            "goes on with it, `models load` takes it back"
        )


def _way_out(info: VersionInfo, found: Sequence[VersionInfo]) -> str:
    """What helps a version with a share that nobody serves."""
    others = [
        one.version
        for one in found
        if one.model == info.model and one.groups and one.state == "ready"
    ]
    if others:
        return f"`tokenmill models switch {info.model} {min(others)}` gives them to it"
    return (
        f"`tokenmill work --name {info.model} --version {info.version}` starts one, "
        f"`tokenmill models retire {info.model}` ends the model"
    )


def _row(info: VersionInfo) -> list[str]:
    return [
        info.model,
        info.version,
        info.state,
        "any" if info.share is None else f"{info.share:g} %",
        str(info.groups),
        str(info.running),
        info.weights_version or "-",
        _health(info),
        _copies(info),
    ]


def _health(info: VersionInfo) -> str:
    report = info.health
    if report is None:
        return f"{info.health_checks} checks" if info.health_checks else "-"
    passed = report.num_checks - report.num_failed
    text = f"{passed}/{report.num_checks}"
    if report.perplexity is not None:
        text += f", perplexity {report.perplexity:.4g}"
    return text


def _copies(info: VersionInfo) -> str:
    share = f"{info.shadow_percent:g} %" if info.shadow_percent else ""
    report = info.shadow
    if report is None or not report.compared:
        return share or "-"
    agreed = f"n {report.compared}, same {_percent(report.exact)}"
    return f"{share}, {agreed}" if share else agreed


def print_report(report: ShadowReport) -> None:
    """Prints how copies compare with their originals."""
    facts = [
        ("version", f"{report.version} of {report.model}"),
        ("copied", f"{report.copied}, compared {report.compared}"),
        ("not copied", str(report.skipped)),
        *(("", _why_not(report, reason)) for reason in report.skipped_by_reason),
        ("failed", f"{report.failed} {report.last_error}".rstrip()),
        ("same output", _percent(report.exact)),
        ("common prefix", _percent(report.prefix)),
    ]
    print_facts(facts)
    print_table(
        ("SINCE START", "TTFT P50", "TTFT P95", "TOTAL P50", "TOTAL P95"),
        [_side("serving", report.serving), _side(report.version, report.shadow)],
    )


def _why_not(report: ShadowReport, reason: str) -> str:
    words = {str(name): text for name, text in SKIPPED.items()}
    return f"{report.skipped_by_reason[reason]} {words.get(reason, reason)}"


def _side(name: str, side: SideLatency) -> list[str]:
    values = (side.ttft_p50_ms, side.ttft_p95_ms, side.total_p50_ms, side.total_p95_ms)
    return [name, *("-" if one is None else f"{one:.1f} ms" for one in values)]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def shares_line(shares: Mapping[str, float]) -> str:
    """Returns shares as people read them, the largest first."""
    ordered = sorted(shares.items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f"{version} {part:g} %" for version, part in ordered)
