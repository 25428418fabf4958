"""Bulk work from a notebook: documents in, summaries out, and on where it stopped.

Cells are marked as editors that run notebooks from .py files know them. Start a pool
first: `tokenmill up`. As a script: `python notebook.py`.
"""

# %% Documents, from wherever they come: one JSON object a line.
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = os.environ.get("MODEL", "smollm2-135m")
folder = Path(os.environ.get("FOLDER") or tempfile.mkdtemp())
documents = [
    {
        "id": f"doc-{n}",
        "title": f"The {name}",
        "text": f"The {name} turns in the wind. It grinds what the valley brings. "
        f"Its miller writes every sack of the {name} down in a book.",
    }
    for n, name in enumerate(("mill", "sail", "wheel", "stone"))
]
source = folder / "documents.jsonl"
source.write_text("".join(json.dumps(d) + "\n" for d in documents), encoding="utf-8")

# %% Summaries. Run this cell again after an interrupt: it goes on where it stopped.
summaries = folder / "summaries.jsonl"
command = [sys.executable, "-m", "tokenmill", "bulk", "summarize", str(source)]
options = ["-o", str(summaries), "--max-words", "30", "--model", MODEL]
done = subprocess.run([*command, *options], check=False)
print("exit code", done.returncode)  # 3: some documents failed, the others are there

# %% Look at them: one line a document, an error in the line of one that failed.
rows = [json.loads(line) for line in summaries.read_text("utf-8").splitlines()]
for row in sorted(rows, key=lambda row: row["id"]):
    text = row["summary"] if "summary" in row else row["error"]["message"]
    print(f"{row['id']:<8} {text[:70]}")

# %% A few prompts without a file, results as they come.
from tokenmill import JobClass, Prompt, Sampling, SyncClient  # noqa: E402

with SyncClient() as mill:
    prompts = [
        Prompt(
            f"One word for {row['id']}:",
            model=MODEL,
            job_class=JobClass.BULK,
            sampling=Sampling(max_tokens=8),
        )
        for row in rows
    ]
    for job in mill.as_completed(mill.submit_many(prompts)):
        print(job.id, job.result().text.strip())
