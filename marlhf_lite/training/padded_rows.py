"""Several processes share the rows of an epoch's last step: padding rows of weight 0 fill it up.

accelerate would fill it with the first rows of the epoch instead, which would then be trained on twice: several
processes would not make the update of one (its `even_batches`).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import datasets
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader, Sampler

if TYPE_CHECKING:  # what `PaddedRows` is mixed into
    from transformers import Trainer
else:
    Trainer = object


class PaddedBatches(BatchSampler):
    """The batches of another sampler, filled up with a padding row so that they can be shared among the processes.

    A batch that is not full gets copies of the padding row. Whole batches of it follow at the end, until the number of
    batches is a multiple of the number of processes.
    """

    def __init__(self, batches: BatchSampler, processes: int, padding: int):
        super().__init__(batches.sampler, batches.batch_size, drop_last=False)
        self.processes = processes
        self.padding = padding  # the index of the padding row

    def __iter__(self) -> Iterator[list[int]]:
        count = 0
        for batch in super().__iter__():
            count += 1
            missing = self.batch_size - len(batch)
            yield [*batch, *[self.padding] * missing]
        while count % self.processes:
            count += 1
            yield [self.padding] * self.batch_size

    def __len__(self) -> int:
        count = super().__len__()
        rounds = -(-count // self.processes)  # rounded up
        return rounds * self.processes


class PaddedRows(Trainer):
    """Makes a trainer of transformers pad the last step of an epoch. A subclass says what a padding row is."""

    def padding_row(self, row: dict) -> dict:
        """Make of a row one of the same columns from which nothing is learned."""
        raise NotImplementedError

    def get_train_dataloader(self) -> DataLoader:
        """Batches of this process. With several processes, a batch that is not full gets copies of a padding row."""
        processes = self.accelerator.num_processes
        if processes == 1:
            return super().get_train_dataloader()

        # 1. Transformers makes the loader of a dataset with the padding row at its end.
        rows = cast(datasets.Dataset, self.train_dataset)
        padding = datasets.Dataset.from_list([self.padding_row(rows[0])], features=rows.features)
        self.train_dataset = datasets.concatenate_datasets([rows, padding])
        try:
            loader = super().get_train_dataloader()
        finally:
            self.train_dataset = rows

        # 2. The padding row is drawn only where a batch is not full; see `_get_train_sampler`.
        shard = loader.batch_sampler
        assert isinstance(shard, BatchSamplerShard)  # what accelerate makes for several processes
        shard.batch_sampler = PaddedBatches(shard.batch_sampler, processes, padding=len(rows))
        return loader

    def _get_train_sampler(self, train_dataset: datasets.Dataset | None = None) -> Sampler | None:
        """Draw the true rows only: the padding row comes where a batch is not full."""
        if train_dataset is None or self.accelerator.num_processes == 1:
            return super()._get_train_sampler(train_dataset)
        # The last row is the padding row, which `get_train_dataloader` has added.
        true_rows = train_dataset.select(range(len(train_dataset) - 1))
        return super()._get_train_sampler(true_rows)
