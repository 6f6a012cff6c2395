"""What every subpackage may use: dataclasses that take little time to make, names that load late, flags."""
