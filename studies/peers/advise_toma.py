"""toma: batch() from the initial batch size of its README, in the precision that the user has."""

from toma import toma
from user import User, advise

NUM_STEPS = 5  # of the training that it wraps, after which the batch is taken to fit


def seek(user: User):
    @toma.batch(initial_batchsize=512)
    def train_model(batchsize):
        model = user.part.model()
        optimizer = user.part.optimizer(model.parameters())
        for _, batch in zip(range(NUM_STEPS), user.loader(batchsize), strict=False):
            optimizer.zero_grad()
            user.loss(model, batch).backward()
            optimizer.step()
        return batchsize

    return {"setting": {"precision": "fp32", "batch_size": train_model(), "accumulation_steps": 1}}


if __name__ == "__main__":
    advise(seek)
