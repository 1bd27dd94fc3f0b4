"""Accelerate: find_executable_batch_size from its own start, with bf16."""

from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from user import User, advise

NUM_STEPS = 5  # of the training that it wraps, after which the batch is taken to fit


def seek(user: User):
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)

    @find_executable_batch_size
    def inner_training_loop(batch_size):
        accelerator.free_memory()
        model = user.part.model()
        optimizer = user.part.optimizer(model.parameters())
        model, optimizer, loader = accelerator.prepare(model, optimizer, user.loader(batch_size))
        for _, batch in zip(range(NUM_STEPS), loader, strict=False):
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = user.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
        return batch_size

    return {"setting": {"precision": "bf16", "batch_size": inner_training_loop(), "accumulation_steps": 1}}


if __name__ == "__main__":
    advise(seek)
