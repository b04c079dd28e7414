"""python -m zbpipe COMMAND"""

import sys

from zbpipe._cli import main

if __name__ == "__main__":
    sys.exit(main())
