"""A naive model of the scheduler, written to be obviously right, split by promise.

    order.py         who goes first
    cost.py          the ceiling: how much fits (with memory: `memory.py`)
    wake.py          when a batch leaves, and when to ask again
    conservation.py  every ticket ends once, also where calls fail
    batches.py       these put together into a batch; `model.py` adds inputs and questions

Lists, sorting and summing over and over: nothing is kept that can be computed again, nothing is fast. It shares no code
with the core apart from value types, errors and, for learned time, the cost model (which has its own tests). It knows
every rule but the window selection, which has a slow check of its own in `test_select.py`.
"""

from .cost import Seconds as Seconds
from .cost import Tokens as Tokens
from .cost import Units as Units
from .model import Oracle as Oracle
from .records import Expected as Expected
from .records import Seen as Seen
from .records import World as World
