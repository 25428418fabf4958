-- Puts a job back to the queue through the `resume` stream, which is read first.
local REQUEUE_FIELDS = {
  'state', 'epoch', 'owner', 'cancel', 'tenant', 'tokens', 'max_tokens', 'priority',
  'deadline', 'bytes', 'bucket', 'keep_ms', 'idem', 'entry', 'entry_key', 'attempts',
  'lease_losses', 'alone_losses', 'start_losses', 'lost', 'enqueued_ms',
  'first_ms', 'webhook', 'weights',
  unpack(CREDIT_FIELDS),
}

local function requeue(at, id, job, resume_key, kind)
  local entry = redis.call(
    'XADD', resume_key, '*', 'id', id, 'tokens', job.tokens,
    'max_tokens', job.max_tokens,
    'priority', job.priority == '' and '0' or job.priority,
    'deadline', job.deadline, 'tenant', job.tenant, 'bytes', job.bytes,
    'class', job.class, 'bucket', job.bucket,
    'started', job.first_ms == '' and '0' or '1',
    'losses', job.lease_losses == '' and '0' or job.lease_losses, 'kind', kind,
    -- What it was begun with: it goes on with the same, or not at all.
    'weights', job.weights,
    -- Its place is that of its enqueue, before all that came later; a delayed job
    -- begins to wait only now.
    'enqueued_ms', kind == 'due' and '' or job.enqueued_ms
  )
  redis.call(
    'HSET', KEYS[at], 'state', 'queued', 'owner', '', 'batch', '',
    'entry', entry, 'entry_key', resume_key
  )
end
