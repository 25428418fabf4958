"""What every process shares: messages, keys, scripts, settings, supervision."""
