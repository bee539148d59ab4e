"""What every layer stands on: configuration, keyed random numbers, files, devices."""
