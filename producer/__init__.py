"""The producer: enqueue prompts, await results, follow streams. No model stack."""
