"""One model over several processes: each rank holds a part of every layer."""
