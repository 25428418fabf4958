"""Many prompts in one call, results as they complete, from blocking code.

Start a pool first: `tokenmill up`.
"""

from tokenmill import JobClass, Prompt, Sampling, SyncClient
from tokenmill.shared.errors import JobFailed

TOPICS = ("rain", "bread", "trains", "moss", "glass", "tides", "bees", "chalk")


def main() -> None:
    """Submits them all and prints each fact as it comes."""
    prompts = [
        Prompt(
            f"A short fact about {topic}:",
            sampling=Sampling(max_tokens=32, stop=("\n",)),
            job_class=JobClass.BULK,
            idempotency_key=f"facts-{topic}",
        )
        for topic in TOPICS
    ]
    with SyncClient() as mill:
        jobs = mill.submit_many(prompts)
        topics = {job.id: topic for job, topic in zip(jobs, TOPICS, strict=True)}
        for job in mill.as_completed(jobs):
            try:
                print(f"{topics[job.id]}: {job.result().text.strip()}")
            except JobFailed as error:
                print(f"{topics[job.id]}: {error}")


if __name__ == "__main__":
    main()
