//! Queue of DNS questions over UDP. It limits the questions of each tenant and serves the tenants
//! round robin. Pure: it receives and answers nothing. Start at [`QuestionQueue::push`].

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

use canal_model::ids::ServiceId;

/// Maximum number of questions that wait, of all tenants together. At 1,232 bytes each they take 5
/// MiB.
pub(super) const QUESTIONS_MAX: usize = 4096;
/// Maximum number of questions that wait of one tenant. A 16th of all. A dropped question is
/// repeated by its client; nobody measured the number.
pub(super) const TENANT_QUESTIONS_MAX: usize = 256;

/// A question that was received and not answered yet.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WaitingQuestion {
    pub(super) from: SocketAddr,
    /// Address to which the question came, which is also the source of the answer.
    pub(super) to: IpAddr,
    pub(super) bytes: Vec<u8>,
}

/// Result of adding a question to the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QuestionFate {
    Queued,
    /// The tenant has the maximum number of questions, so the new question is dropped.
    Refused,
    /// The question is queued. The oldest question of this tenant, which had the most, was dropped
    /// for it.
    Displaced(ServiceId),
}

/// The questions that wait, by the tier service of their tenant.
#[derive(Debug, Default)]
pub(super) struct QuestionQueue {
    /// Tenants without questions have no entry.
    tenants: HashMap<ServiceId, VecDeque<WaitingQuestion>>,
    /// The tenants with questions, in the order of their turns. Each is listed once.
    turns: VecDeque<ServiceId>,
    len: usize,
}

impl QuestionQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a question of a tenant, unless the tenant has too many.
    pub(super) fn push(&mut self, tenant: ServiceId, question: WaitingQuestion) -> QuestionFate {
        let own = self.tenants.get(&tenant).map_or(0, VecDeque::len);
        if own >= TENANT_QUESTIONS_MAX {
            return QuestionFate::Refused;
        }
        let mut fate = QuestionFate::Queued;
        if self.len >= QUESTIONS_MAX {
            let most = self
                .tenants
                .iter()
                .max_by_key(|(_, questions)| questions.len())
                .map(|(tenant, questions)| (*tenant, questions.len()));
            let Some((largest, _)) = most.filter(|(_, len)| *len > own + 1) else {
                return QuestionFate::Refused;
            };
            // It stays in `turns`, because it has further questions.
            self.len -= usize::from(
                self.tenants
                    .get_mut(&largest)
                    .and_then(VecDeque::pop_front)
                    .is_some(),
            );
            fate = QuestionFate::Displaced(largest);
        }
        if own == 0 {
            self.turns.push_back(tenant);
        }
        self.tenants.entry(tenant).or_default().push_back(question);
        self.len += 1;
        fate
    }

    /// Removes the oldest question of the tenant whose turn it is. Every answer costs about the
    /// same, so a turn is one question.
    pub(super) fn pop(&mut self) -> Option<WaitingQuestion> {
        let tenant = self.turns.pop_front()?;
        let questions = self.tenants.get_mut(&tenant)?;
        let question = questions.pop_front();
        if questions.is_empty() {
            self.tenants.remove(&tenant);
        } else {
            self.turns.push_back(tenant);
        }
        self.len -= usize::from(question.is_some());
        question
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(n: usize) -> ServiceId {
        ServiceId::new(u32::try_from(n).unwrap()).unwrap()
    }

    fn question(of: usize, n: usize) -> WaitingQuestion {
        let port = u16::try_from(of).unwrap();
        WaitingQuestion {
            from: ([127, 0, 0, 1], port).into(),
            to: IpAddr::from([127, 0, 0, 1]),
            bytes: n.to_be_bytes().to_vec(),
        }
    }

    #[test]
    fn tenants_are_served_round_robin_whatever_they_query() {
        let mut queue = QuestionQueue::default();
        let fates: Vec<_> = (0..TENANT_QUESTIONS_MAX + 2)
            .map(|n| queue.push(tenant(1), question(1, n)))
            .collect();
        assert_eq!(
            fates[TENANT_QUESTIONS_MAX - 1..],
            [
                QuestionFate::Queued,
                QuestionFate::Refused,
                QuestionFate::Refused
            ]
        );
        for n in 0..3 {
            assert_eq!(queue.push(tenant(2), question(2, n)), QuestionFate::Queued);
        }
        let order: Vec<_> = (0..8).map(|_| queue.pop().unwrap().from.port()).collect();
        assert_eq!(order, [1, 2, 1, 2, 1, 2, 1, 1]);
        let rest: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(rest.len(), TENANT_QUESTIONS_MAX - 5);
        assert_eq!(
            rest.last(),
            Some(&question(1, TENANT_QUESTIONS_MAX - 1)),
            "of one tenant they are answered in order"
        );
        assert!(queue.is_empty() && queue.tenants.is_empty() && queue.turns.is_empty());
    }

    #[test]
    fn full_queue_drops_the_oldest_question_of_the_tenant_with_the_most() {
        let mut queue = QuestionQueue::default();
        let flooding = QUESTIONS_MAX / TENANT_QUESTIONS_MAX;
        for n in 0..TENANT_QUESTIONS_MAX {
            (1..=flooding).for_each(|of| {
                assert_eq!(
                    queue.push(tenant(of), question(of, n)),
                    QuestionFate::Queued
                )
            });
        }
        let fates: Vec<_> = (0..TENANT_QUESTIONS_MAX)
            .map(|n| queue.push(tenant(99), question(99, n)))
            .collect();
        let queued = fates
            .iter()
            .filter(|fate| matches!(fate, QuestionFate::Displaced(_)))
            .count();
        // All have about as many then.
        assert!(
            queued >= QUESTIONS_MAX / (flooding + 1) - 1 && queued < TENANT_QUESTIONS_MAX,
            "{queued}"
        );
        assert_eq!(
            fates[queued..]
                .iter()
                .filter(|fate| **fate == QuestionFate::Refused)
                .count(),
            TENANT_QUESTIONS_MAX - queued
        );
        assert_eq!(queue.len, QUESTIONS_MAX);
        let own = (0..=flooding)
            .filter_map(|_| queue.pop())
            .filter(|question| question.from.port() == 99)
            .count();
        assert_eq!(own, 1, "its turn comes once a round");
    }
}
