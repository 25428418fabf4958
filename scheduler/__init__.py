"""The scheduler: which waiting jobs go to which worker group now."""
