"""`python -m marlhf_lite`, and so `accelerate launch -m marlhf_lite`."""

import sys

from marlhf_lite.cli import main

sys.exit(main())
