//! What clients say of their sessions: `hicache/policy/session_order.py`, under *hints*.

use crate::session_order::SessionOrder;
use crate::session_records::Session;

impl SessionOrder {
    /// The session is over.
    pub fn close(&mut self, name: i64) {
        self.hint(name, |session| session.is_over = true);
    }

    /// The turn that is at work, or the last one, is the session's only one.
    pub fn one_shot(&mut self, name: i64) {
        self.hint(name, |session| {
            session.is_one_shot = session.at_work > 0;
            session.is_over |= session.at_work == 0;
        });
    }

    /// It is not over after all.
    pub fn reopen(&mut self, name: i64) {
        if let Some(at) = self.session_named.get(&name) {
            for turn in &self.sessions.items[*at].turns {
                self.turns.items[*turn].is_over = false;
            }
        }
        self.hint(name, |session| (session.is_over, session.is_one_shot) = (false, false));
    }

    /// The session will not go on from its last turn; it holds for what is left of that one.
    pub fn abandon_branch(&mut self, name: i64) {
        if let Some(turn) = self.session_named.get(&name).and_then(|at| self.sessions.items[*at].turns.last())
        {
            self.turns.items[*turn].is_over = true;
        }
        self.hint(name, |_| ());
    }

    /// The client says when the session comes back.
    pub fn expects_return(&mut self, name: i64, in_s: f64, now_s: f64) {
        self.pass_time(now_s);
        let returns_at_s = Some(self.now_s + in_s);
        self.hint(name, |session| {
            (session.is_over, session.is_one_shot) = (false, false);
            session.returns_at_s = returns_at_s;
        });
    }

    /// Change a session that is known, and what its turns are worth.
    fn hint(&mut self, name: i64, change: impl FnOnce(&mut Session)) {
        let Some(at) = self.session_named.get(&name).copied() else { return };
        change(&mut self.sessions.items[at]);
        for number in 0..self.sessions.items[at].turns.len() {
            let turn = self.sessions.items[at].turns[number];
            if self.turns.items[turn].is_waiting {
                self.rate(turn);
            }
        }
    }
}
