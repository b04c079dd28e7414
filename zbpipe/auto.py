"""Importing this module patches torch: `import zbpipe.auto` is `zbpipe.patch()`, and raises what that raises."""

import zbpipe

zbpipe.patch()
