"""The beginning of programs for ``python -c`` that import a module of ``torchtitan.grpo``."""

from torchtitan.grpo.system.light_start import LIGHT_PYTHON

# Without it, `import torchtitan` imports torch and its compiler, for several seconds.
LIGHT = f"import runpy; runpy.run_path({LIGHT_PYTHON[1]!r})['install_bare_package']()\n"
