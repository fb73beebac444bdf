//! Fairness between tenants: whoever was served least goes first (the virtual token counter of Sheng et al., "Fairness in Serving
//! Large Language Models", OSDI 2024).

use std::collections::{BTreeSet, HashMap};

use crate::ids::TenantId;

/// Served tokens per tenant. A tenant that comes back after a pause starts at the floor: pauses earn nothing.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    by_id: HashMap<TenantId, u32>,
    entries: Vec<Tenant>,
    vacant: Vec<u32>,
    /// (served, tenant) of those without a sequence whose count still matters, because it is above the floor.
    idle: BTreeSet<(u64, u32)>,
    /// Served tokens of the tenant whose turn it was last.
    floor: u64,
}

#[derive(Debug)]
struct Tenant {
    id: TenantId,
    served: u64,
    sequences: u32,
}

impl Tenants {
    /// A sequence of the tenant begins; its index until all of them are gone.
    pub(crate) fn join(&mut self, id: TenantId) -> u32 {
        let index = match self.by_id.get(&id) {
            Some(&index) => index,
            None => self.insert(id),
        };
        let entry = &mut self.entries[index as usize];
        self.idle.remove(&(entry.served, index));
        entry.sequences += 1;
        index
    }

    fn insert(&mut self, id: TenantId) -> u32 {
        let entry = Tenant {
            id,
            served: self.floor,
            sequences: 0,
        };
        let index = match self.vacant.pop() {
            Some(index) => {
                self.entries[index as usize] = entry;
                index
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        self.by_id.insert(id, index);
        index
    }

    /// A sequence of the tenant is gone.
    pub(crate) fn leave(&mut self, index: u32) {
        let entry = &mut self.entries[index as usize];
        entry.sequences -= 1;
        if entry.sequences > 0 {
            return;
        }
        if entry.served > self.floor {
            self.idle.insert((entry.served, index));
        } else {
            self.by_id.remove(&entry.id);
            self.vacant.push(index);
        }
    }

    /// Served tokens that count from now on for a tenant that had nothing waiting.
    pub(crate) fn start_waiting(&mut self, index: u32) -> u64 {
        let entry = &mut self.entries[index as usize];
        entry.served = entry.served.max(self.floor);
        entry.served
    }

    pub(crate) fn served(&self, index: u32) -> u64 {
        self.entries[index as usize].served
    }

    pub(crate) fn charge(&mut self, index: u32, tokens: u32) {
        self.entries[index as usize].served += u64::from(tokens);
    }

    /// It is the turn of a tenant with `served` tokens: counts up to there say nothing any more.
    pub(crate) fn advance_floor(&mut self, served: u64) {
        self.floor = self.floor.max(served);
        while let Some(&(count, index)) = self.idle.first() {
            if count > self.floor {
                break;
            }
            self.idle.pop_first();
            self.by_id.remove(&self.entries[index as usize].id);
            self.vacant.push(index);
        }
    }

    /// `indices` has the tenant of every living sequence.
    pub(crate) fn check_integrity(&self, indices: impl Iterator<Item = u32>) -> Result<(), String> {
        let mut living = vec![0; self.entries.len()];
        indices.for_each(|index| living[index as usize] += 1);
        for (&id, &index) in &self.by_id {
            let entry = &self.entries[index as usize];
            let is_idle = self.idle.contains(&(entry.served, index));
            if entry.id != id
                || entry.sequences != living[index as usize]
                || is_idle != (entry.sequences == 0)
            {
                return Err(format!("tenant {id} counts {} sequences", entry.sequences));
            }
        }
        if self.by_id.len() + self.vacant.len() != self.entries.len() {
            return Err(format!(
                "{} tenants are lost",
                self.entries.len() - self.by_id.len() - self.vacant.len()
            ));
        }
        Ok(())
    }
}
