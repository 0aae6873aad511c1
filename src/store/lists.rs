//! Two intrusive lists over the nodes: all files by recency, and what L1 may drop.
//!
//! Links live in the nodes, so moving a file to the front costs a few writes and no allocation, with
//! ten million files as with ten.

use super::node::{Arena, Idx, LISTED, Links, NONE};

#[derive(Debug, Clone, Copy)]
pub struct Ends {
    /// Most recently used.
    pub front: Idx,
    /// Least recently used.
    pub back: Idx,
}

impl Default for Ends {
    fn default() -> Self {
        Self { front: NONE, back: NONE }
    }
}

/// Which links of a node a list uses.
pub trait Chain {
    fn links(nodes: &mut Arena, idx: Idx) -> Option<&mut Links>;
    fn listed(nodes: &Arena, idx: Idx) -> bool;
    fn set_listed(nodes: &mut Arena, idx: Idx, on: bool);
}

/// All visible files; the back leaves L2 first.
#[derive(Debug)]
pub struct Recency;

impl Chain for Recency {
    fn links(nodes: &mut Arena, idx: Idx) -> Option<&mut Links> {
        nodes.get_mut(idx).map(|node| &mut node.recency)
    }
    fn listed(nodes: &Arena, idx: Idx) -> bool {
        nodes.get(idx).is_some_and(|node| node.has(LISTED))
    }
    fn set_listed(nodes: &mut Arena, idx: Idx, on: bool) {
        if let Some(node) = nodes.get_mut(idx) {
            node.set(LISTED, on);
        }
    }
}

/// Files of which L1 may drop something; the back goes first.
#[derive(Debug)]
pub struct Droppable;

impl Chain for Droppable {
    fn links(nodes: &mut Arena, idx: Idx) -> Option<&mut Links> {
        nodes.get_mut(idx)?.hot.as_mut().map(|hot| &mut hot.l1)
    }
    fn listed(nodes: &Arena, idx: Idx) -> bool {
        nodes.get(idx).and_then(|node| node.hot.as_ref()).is_some_and(|hot| hot.in_l1_list)
    }
    fn set_listed(nodes: &mut Arena, idx: Idx, on: bool) {
        if let Some(hot) = nodes.get_mut(idx).and_then(|node| node.hot.as_mut()) {
            hot.in_l1_list = on;
        }
    }
}

impl Ends {
    pub fn remove<C: Chain>(&mut self, nodes: &mut Arena, idx: Idx) {
        if !C::listed(nodes, idx) {
            return;
        }
        let Some(links) = C::links(nodes, idx).map(std::mem::take) else { return };
        match C::links(nodes, links.prev) {
            Some(prev) => prev.next = links.next,
            None => self.front = links.next,
        }
        match C::links(nodes, links.next) {
            Some(next) => next.prev = links.prev,
            None => self.back = links.prev,
        }
        C::set_listed(nodes, idx, false);
    }

    pub fn push_front<C: Chain>(&mut self, nodes: &mut Arena, idx: Idx) {
        self.remove::<C>(nodes, idx);
        let front = self.front;
        let Some(links) = C::links(nodes, idx) else { return };
        *links = Links { prev: NONE, next: front };
        match C::links(nodes, front) {
            Some(old) => old.prev = idx,
            None => self.back = idx,
        }
        self.front = idx;
        C::set_listed(nodes, idx, true);
    }

    /// The neighbour towards the front.
    pub fn towards_front<C: Chain>(nodes: &mut Arena, idx: Idx) -> Idx {
        C::links(nodes, idx).map_or(NONE, |links| links.prev)
    }
}

#[cfg(test)]
mod tests {
    use super::super::node::{Detail, Node};
    use super::*;

    fn order(nodes: &mut Arena, ends: Ends) -> Vec<Idx> {
        let mut out = Vec::new();
        let mut at = ends.back;
        while at != NONE {
            out.push(at);
            at = Ends::towards_front::<Recency>(nodes, at);
        }
        out
    }

    #[test]
    fn the_list_is_ordered_by_last_touch() {
        let mut nodes = Arena::default();
        let mut ends = Ends::default();
        let all: Vec<_> = (0..4).map(|_| nodes.insert(Node::new(Detail::File, 0, 0, 0, 0))).collect();
        for &idx in &all {
            ends.push_front::<Recency>(&mut nodes, idx);
        }
        ends.push_front::<Recency>(&mut nodes, all[1]);
        assert_eq!(order(&mut nodes, ends), [all[0], all[2], all[3], all[1]]);
        ends.remove::<Recency>(&mut nodes, all[0]);
        ends.remove::<Recency>(&mut nodes, all[3]);
        ends.remove::<Recency>(&mut nodes, all[3]);
        assert_eq!(order(&mut nodes, ends), [all[2], all[1]]);
        ends.remove::<Recency>(&mut nodes, all[1]);
        ends.remove::<Recency>(&mut nodes, all[2]);
        assert_eq!((ends.front, ends.back), (NONE, NONE));
    }
}
