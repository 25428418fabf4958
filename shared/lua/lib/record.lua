-- A job's hash as a table, or nil when there is none. The first of `fields` must be
-- `state`; a missing field reads as ''. A key of another type counts as no job, so
-- that garbage written there by a stranger stops nobody else. For the same reason
-- entries named by a record are removed with pcall: the rest of the call goes on.
local function read_job(key, fields)
  local values = redis.pcall('HMGET', key, unpack(fields))
  if values.err or not values[1] then
    return nil
  end
  local job = {}
  for i = 1, #fields do
    job[fields[i]] = values[i] or ''
  end
  return job
end

local function held_by(job, group, epoch)
  return job ~= nil
    and (job.state == 'running' or job.state == 'dispatched')
    and job.owner == group
    and job.epoch == epoch
end
