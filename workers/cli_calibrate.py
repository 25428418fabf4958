"""The command that calibrates a model's INT8 weights: calibrate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ..shared.cli_options import PrintJson
from ..shared.cli_support import handle_errors
from .engine.model.calibration.text import LENGTH, SAMPLES

if TYPE_CHECKING:
    from .engine.model.calibration.result import Calibration
    from .engine.model.calibration.text import Coverage

_Text = Annotated[
    Path | None,
    typer.Option(
        "--text",
        help="Prompts as your users write them: JSONL (text, prompt or messages), "
        "or plain text.",
    ),
]


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("calibrate")(handle_errors(calibrate_model))


def calibrate_model(
    model: Annotated[str, typer.Argument(help="Directory, hub id or built-in name.")],
    text: _Text = None,
    on_text: Annotated[
        bool, typer.Option("--on-text", help="Calibrate on the given text itself.")
    ] = False,
    only_report: Annotated[
        bool, typer.Option("--only-report", help="Tell the coverage and leave.")
    ] = False,
    samples: Annotated[int, typer.Option(min=1, help="Samples of text.")] = SAMPLES,
    length: Annotated[int, typer.Option(min=8, help="Tokens a sample.")] = LENGTH,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="File; else where workers look.")
    ] = None,
    as_json: PrintJson = False,
) -> None:
    """Measure a model once, so that INT8 costs it less; workers then use the result."""
    from .extras import model_stack
    from .progress import bar

    with model_stack():
        import torch

        from .engine.model.calibration import text as texts
        from .engine.model.calibration.calibrate import calibrate
        from .engine.model.calibration.files import save_for, write_calibration
        from .engine.model.resolve import resolve_model

    torch.set_num_threads(threads or torch.get_num_threads())
    user = None if text is None else texts.read_texts(text)
    base = texts.read_texts(texts.SHIPPED_TEXT)
    with bar(model, silent=as_json) as report:
        path = resolve_model(model, progress=report)
        tokenizer = texts.load_tokenizer(path)
        covered = None if user is None else texts.coverage(tokenizer, user, base)
        if covered is not None and not as_json:
            print(advice(covered))
        if only_report:
            _print(covered, None, None, as_json=as_json)
            return
        chosen = user if user is not None and on_text else base
        name = text.name if text is not None and on_text else texts.SHIPPED_NAME
        pieces = texts.make_samples(tokenizer, chosen, samples=samples, length=length)
        made = calibrate(path, pieces, name, report)
    if output is not None:
        write_calibration(made, output)
    _print(covered, made, output or save_for(made, path), as_json=as_json)


def advice(covered: "Coverage") -> str:
    """Returns what a user's text means for the choice of precision.

    Args:
        covered: The text held against the calibration text.
    """
    share = (
        f"{covered.unseen_share:.1%} of your {covered.words} words are not in the "
        "calibration text"
    )
    if covered.covered:
        return f"{share}: INT8 weights are calibrated for it"
    examples = ", ".join(covered.examples)
    return (
        f"{share} (such as {examples}): mixed INT8 and FP16 is advised, or calibrate "
        "on your own text with --on-text"
    )


def _print(
    covered: "Coverage | None",
    made: "Calibration | None",
    file: Path | None,
    *,
    as_json: bool,
) -> None:
    if not as_json:
        if made is not None:
            _print_lines(made, file)
        return
    facts = {
        "coverage": covered,
        "unseen_share": None if covered is None else covered.unseen_share,
        "advice": None if covered is None else advice(covered),
        "calibration": None if made is None else made.facts,
        "file": None if file is None else str(file),
    }
    print(msgspec.json.encode(facts).decode())


def _print_lines(made: "Calibration", file: Path | None) -> None:
    facts = made.facts
    print(f"{facts.samples} samples, {facts.tokens} tokens of {facts.text}")
    print(
        f"estimated rise of perplexity {facts.loss_percent:.3f} % "
        f"({facts.plain_loss_percent:.3f} % without)"
    )
    for layer in facts.sensitive:
        print(f"kept in two planes: {layer.name} ({layer.loss_percent:.4f} %)")
    print(f"written to {file}")
