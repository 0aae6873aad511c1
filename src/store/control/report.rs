//! `.ctl/leases` and `.ctl/hints`: who holds what, and who wants what.

use std::fmt::Write as _;
use std::sync::Arc;

use crate::store::Store;
use crate::sync::now;
use crate::units::Bytes;

impl Store {
    /// One line for each lease that `uid` may see: its own, and all for root.
    pub fn leases_text(self: &Arc<Self>, uid: u32) -> String {
        let core = self.lock();
        let now = now();
        let mut out = String::from("# id pid command age ttl ranges bytes parties\n");
        let all = &core.control.leases.all;
        let mut ids: Vec<u64> =
            all.iter().filter(|(_, lease)| uid == 0 || lease.who.uid == uid).map(|(id, _)| *id).collect();
        ids.sort_unstable();
        for (id, lease) in ids.into_iter().filter_map(|id| Some((id, all.get(&id)?))) {
            // Spaces in a command would move the columns.
            let command = lease.who.command.replace(' ', "_");
            let _ = writeln!(
                out,
                "{id} {} {command} {:.1}s {:.1}s {} {} {}/{}",
                lease.who.tgid,
                now.saturating_duration_since(lease.granted).as_secs_f64(),
                lease.expires.saturating_duration_since(now).as_secs_f64(),
                lease.items.len(),
                Bytes(lease.bytes),
                lease.shares.len(),
                lease.parties
            );
        }
        out
    }

    /// The same of hints: one line for each that has not ended.
    pub fn hints_text(self: &Arc<Self>, uid: u32) -> String {
        let core = self.lock();
        let now = now();
        let mut out =
            String::from("# ticket pid command state priority age deadline bytes of ranges ahead estimate\n");
        for (id, hint) in core.control.hints.all.iter().filter(|(_, hint)| uid == 0 || hint.who.uid == uid) {
            let Some(ticket) = core.control.tickets.get(*id) else { continue };
            let at = core.hint_progress(*id);
            let deadline = match hint.deadline {
                Some(at) => format!("{:.1}s", at.saturating_duration_since(now).as_secs_f64()),
                None => "-".to_owned(),
            };
            let _ = writeln!(
                out,
                "{id} {} {} {} {} {:.1}s {deadline} {} {} {} {} {}ms",
                ticket.who.tgid,
                ticket.who.command.replace(' ', "_"),
                if hint.fetch.is_some() { "running" } else { "queued" },
                hint.priority,
                now.saturating_duration_since(ticket.made).as_secs_f64(),
                Bytes(at.bytes),
                Bytes(at.bytes_total),
                hint.wants.len(),
                at.ahead,
                at.estimate_ms
            );
        }
        out
    }
}
