"""Reading C++ text."""
