"""The lean import of transformers: light, complete, and without traces afterwards."""

import subprocess
import sys

HEAVY = ("torch._dynamo", "sympy", "scipy", "torch.distributed.tensor")


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_serving_never_uses_stays_out_and_comes_back_on_demand() -> None:
    out = run(
        "import sys\n"
        "from tokenmill.workers.engine.model.lean_import import import_transformers\n"
        "import_transformers()\n"
        "from transformers.models.llama.modeling_llama import LlamaForCausalLM\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
        "import importlib.util, torch\n"
        # Not installed or importable, but never left behind as absent.
        "assert sys.modules.get('scipy', True), 'scipy stayed hidden'\n"
        "importlib.util.find_spec('scipy')\n"
        "from transformers.masking_utils import TransformGetItemToIndex as made\n"
        "print(torch.distributed.is_available())\n"
        "print(made().__class__.__name__, hasattr(torch._dynamo, 'optimize'))\n"
        "from transformers import GPT2Config\n"
        "print(GPT2Config().model_type)\n"
    )
    assert out.splitlines() == ["[]", "True", "TransformGetItemToIndex True", "gpt2"]


def test_a_release_that_needs_more_is_imported_plainly() -> None:
    out = run(
        "from tokenmill.workers.engine.model import lean_import\n"
        "tried = []\n"
        "def fail_first():\n"
        "    tried.append(1)\n"
        "    if len(tried) == 1: raise ImportError('needs the compiler')\n"
        "lean_import._import = fail_first\n"
        "lean_import.import_transformers()\n"
        "print(len(tried))\n"
    )
    assert "needs the compiler" in out
    assert out.splitlines()[-1] == "2"
