"""Pure tests of what is decided: no process group, no compiler."""
