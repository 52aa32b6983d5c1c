"""Forecasts of training on machines that are not there: step time, memory, what binds, what would
help, from the graphs that would run."""
