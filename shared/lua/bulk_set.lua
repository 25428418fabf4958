-- bulk_set: the driver's word about a run: that it lives, how many items there are, or
-- that the run is to end or to go on.
--
-- KEYS 1 run   hash     the spec and the counters
--      2 wake  channel  told when the run's state changes
--      3 and on: the run's other keys, renewed
-- ARGV 1 ms to live, 2 what: beat, total, cancel, reopen, or settled (the orchestrator
--      has cancelled everything), 3 the total
-- Returns unknown, or the run's state.
--include bulk
--include clock
local MOVES = {
  cancel = { open = 'cancelling' },
  reopen = { cancelled = 'open' },
  settled = { cancelling = 'cancelled' },
}
local what, state = ARGV[2], redis.call('HGET', KEYS[1], 'state')
if not state then
  return 'unknown'
end
if what == 'total' then
  local total = tonumber(ARGV[3] or '')
  if not total or total < 0 then
    return redis.error_reply('ERR tokenmill bulk_set: expected a number of items')
  end
  redis.call('HSET', KEYS[1], 'total', ARGV[3])
elseif what ~= 'beat' and not MOVES[what] then
  return redis.error_reply('ERR tokenmill bulk_set: unknown word')
end
local moved = MOVES[what] and MOVES[what][state]
if moved then
  state = moved
  redis.call('HSET', KEYS[1], 'state', state, 'updated_ms', now_ms())
  redis.call('PUBLISH', KEYS[2], state)
end
if what ~= 'settled' then
  redis.call('HSET', KEYS[1], 'driver_ms', now_ms())
end
touch(KEYS[1], unpack(KEYS, 3))
return state
