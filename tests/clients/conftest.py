import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "autograd"))
sys.path.insert(0, str(Path(__file__).parents[1] / "schedules"))
sys.path.insert(0, str(Path(__file__).parent))
