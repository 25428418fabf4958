-- Whether an error is the server's refusal of every write, whatever the keys hold: the
-- whole call is then to fail and to be repeated, and no job of it is at fault.
local REFUSALS = { 'OOM', 'READONLY', 'MISCONF', 'NOREPLICAS', 'NOPERM', 'MASTERDOWN' }
local function refuses_writes(text)
  for _, word in ipairs(REFUSALS) do
    if string.find(text, word, 1, true) then
      return true
    end
  end
  return false
end
