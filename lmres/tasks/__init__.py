"""tasks: sequences whose depth difficulty can be dialled, made as they are asked for.

A task is a frozen config that answers for its sequences by number: ``rows(split, index)`` is a pure function, so the
batch of a step is the same on any host and after a restart. ``lmres.data`` makes batches of it. ``groups`` are the
finite groups behind ``word``, the word problem; ``text`` stands for no task. To add a task: write its file and add the
class to ``Task`` below; the config, the command line and the tests find it there.

May import: numpy. Knows nothing of the model, of training and of files.
"""

from lmres.tasks.groups import GROUPS, Group, group
from lmres.tasks.text import TEXT, Text
from lmres.tasks.word import WordProblem

Task = Text | WordProblem

__all__ = ["GROUPS", "TEXT", "Group", "Task", "Text", "WordProblem", "group"]
