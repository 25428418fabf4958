-- mark_requeued: notes in the records of dead jobs under which id each runs again.
-- The state of such a job never changes; the mark is for people, and keeps a second
-- requeue from making a second job.
--
-- KEYS 1 and on: job hash, one for each job
-- ARGV 1 and on: id of the new job, one for each
-- Returns one for each job: the id that is noted, or '' when the record is gone.
--include record
local replies = {}
for i = 1, #KEYS do
  local job = read_job(KEYS[i], { 'state', 'requeued_as' })
  if not job or job.state ~= 'failed' then
    replies[i] = ''
  elseif job.requeued_as ~= '' then
    replies[i] = job.requeued_as
  else
    redis.call('HSET', KEYS[i], 'requeued_as', ARGV[i])
    replies[i] = ARGV[i]
  end
end
return replies
