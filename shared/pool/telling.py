"""What `tokenmill up` says of its processes and of the models that they serve."""

from .lines import line, process_line
from .processes import Child, ChildState
from .watching import Watcher


def tell_state(child: Child) -> None:
    """Says what a process does since its state changed."""
    name, state = child.spec.name, child.state
    if state is ChildState.STARTING:
        again = " again" if child.restarts else ""
        process_line(name, child.pid, f"starting{again}")
    elif state is ChildState.RUNNING:
        process_line(name, child.pid, "running")
    elif state is ChildState.WAITING:
        word = "died" if child.exit_code else "ended"
        note = f"{word} (exit {child.exit_code}); again in {child.retry_in_s:.1f} s"
        process_line(name, None, note)
    elif state is ChildState.FAILED:
        process_line(name, None, f"failed (exit {child.exit_code}); not started again")
    else:
        process_line(name, None, "stopped")


def tell_served(watcher: Watcher, model: str) -> None:
    """Says that a model is served, where there are several: each takes its own time."""
    awaited = watcher.awaited
    if awaited:
        line(f"model {model} is served; loading: {', '.join(sorted(awaited))}")
    elif watcher.ready:
        line(f"model {model} is served as well")


def tell_ready(watcher: Watcher) -> None:
    """Says that the pool is ready, what to try, and which models it does not serve."""
    served = sorted(watcher.served)
    which, option = "ready", ""
    if len(served) > 1 or watcher.failing:
        which = f"ready: models {', '.join(served)}"
        option = f" --model {served[0]}"
    line(f'{which}; try: tokenmill submit "Hello"{option} --stream')
    for model, child in sorted(watcher.failing.items()):
        failed = child.state is ChildState.FAILED
        then = "they are not started again" if failed else "they are tried again"
        why = f"its workers end with exit code {child.exit_code}; {then}"
        line(f"warning: model {model} is not served: {why}")
