"""What a recommendation holds for, known without running anything of the user's.

No factory is called, and no method of a user's class: objects are read through their dictionaries and slots. What
counts: code, constants, defaults, closures and globals of the functions and classes that are reached, and the source
files they stand in; settings, shapes and dtypes of live objects; versions of libraries. What does not: values of
tensors, comments, line numbers, the working directory. What Python itself cannot pickle (a lock, an open file, a
generator) has no content that could be compared; it is named among the unknown.

Not seen: files that a factory opens, attributes looked up by a computed name, environment variables whose name is not
written in the code.
"""

from autotune_amp.fingerprint.compare import compute, versions
from autotune_amp.fingerprint.objects import workload_parts

__all__ = ["compute", "versions", "workload_parts"]
