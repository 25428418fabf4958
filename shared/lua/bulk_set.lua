-- bulk_set: a word about a run. The driver's: that it lives, that all items were fed, or
-- that the run is to end or to go on. The orchestrator's: what it has done.
--
-- KEYS 1 run  hash  the spec and the counters
--      2 and on: the run's other keys, renewed
-- ARGV 1 ms to live, 2 what: beat, leave, total, cancel, reopen, refused, 3 how many
--      lines could not be items; settled (everything was cancelled), renewed (so were
--      the items), announced, 3 what was announced
-- Returns unknown, or the run's state: complete when all items of a run that is open
--      were fed and have settled; it is not cancelled any more.
--include bulk
--include clock
local MOVES = {
  cancel = { open = 'cancelling' },
  reopen = { cancelled = 'open' },
  settled = { cancelling = 'cancelled' },
}
local OURS = { settled = true, renewed = true, announced = true }
local THEIRS = { beat = true, leave = true, total = true, refused = true }
local what = ARGV[2]
if not (MOVES[what] or OURS[what] or THEIRS[what]) then
  return redis.error_reply('ERR tokenmill bulk_set: unknown word')
end
local run = redis.call('HMGET', KEYS[1], 'state', 'total', 'settled', 'fed')
local state, total = run[1], tonumber(run[2] or '')
if not state then
  return 'unknown'
end
if what == 'total' then
  -- What this very record has counted: one that was lost has forgotten the others.
  total = tonumber(run[4] or '0')
  redis.call('HSET', KEYS[1], 'total', total)
elseif what == 'refused' then
  redis.call('HSET', KEYS[1], 'refused', ARGV[3])
elseif what == 'leave' then
  redis.call('HSET', KEYS[1], 'left_ms', now_ms())
elseif what == 'renewed' then
  redis.call('HSET', KEYS[1], 'renewed_ms', now_ms())
elseif what == 'announced' then
  redis.call('HSET', KEYS[1], 'announced', ARGV[3])
end
if state == 'open' and total and tonumber(run[3] or '0') >= total then
  state = 'complete'
end
local moved = MOVES[what] and MOVES[what][state]
if moved then
  state = moved
  redis.call('HSET', KEYS[1], 'state', state, 'updated_ms', now_ms())
end
if not OURS[what] then
  redis.call('HSET', KEYS[1], 'driver_ms', now_ms())
end
touch(unpack(KEYS))
return state
