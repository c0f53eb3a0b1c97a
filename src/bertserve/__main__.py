"""`python -m bertserve`, for a checkout that is not installed."""

import sys

from bertserve import main

sys.exit(main())
