//! The path index of one service: a segment trie in one open-addressed table keyed by (node, segment), and per node the candidates
//! that end there. It knows nothing of conditions: candidates are ranks, and smaller ranks win.

use std::hash::{BuildHasher, Hasher};

use foldhash::fast::RandomState;
use hashbrown::HashTable;

/// A place in the trie.
pub(crate) type Node = u32;
/// The place of a match in the order of precedence.
pub(crate) type Rank = u32;

/// The edges of a node to the string prefixes that end inside its next segment hang at the node with this bit.
const INSIDE: u32 = 1 << 31;
/// The parents of hosts; no node has these numbers.
const EXACT_HOST: u32 = u32::MAX;
const SUFFIX_HOST: u32 = u32::MAX - 1;
/// Ends a node's list of prefix lengths, which are kept plus one.
const LENGTHS_END: u32 = 0;
const NO_LENGTHS: u32 = u32::MAX;

/// 16 bytes; the text is stored so that equal hashes cannot be taken for equal segments.
#[derive(Debug, Clone, Copy)]
struct Edge {
    parent: u32,
    child: Node,
    text: u32,
    len: u32,
}

/// Where a node's candidates lie: `exact..elements` end exactly here, `elements..end` are prefixes that end here.
#[derive(Debug, Clone, Copy)]
struct Lists {
    exact: u32,
    elements: u32,
    end: u32,
    lengths: u32,
}

/// Which of a node's lists a candidate is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum List {
    /// The path ends here.
    Exact,
    /// The path ends or goes on with `/` here; for a node inside a segment: goes on anyhow.
    Prefix,
}

/// The finished index.
#[derive(Debug)]
pub(crate) struct Index {
    hash: RandomState,
    edges: HashTable<Edge>,
    texts: Box<[u8]>,
    nodes: Box<[Lists]>,
    ranks: Box<[Rank]>,
    lengths: Box<[u32]>,
}

fn hash_of(hash: &RandomState, parent: u32, text: &[u8]) -> u64 {
    let mut hasher = hash.build_hasher();
    hasher.write_u32(parent);
    hasher.write(text);
    hasher.finish()
}

fn text_of(texts: &[u8], start: u32, len: u32) -> &[u8] {
    &texts[start as usize..start as usize + len as usize]
}

impl Index {
    #[inline]
    fn edge(&self, parent: u32, text: &[u8]) -> Option<u32> {
        let same = |edge: &Edge| edge.parent == parent && text_of(&self.texts, edge.text, edge.len) == text;
        self.edges.find(hash_of(&self.hash, parent, text), same).map(|edge| edge.child)
    }

    /// The node after a whole segment.
    #[inline]
    pub(crate) fn child(&self, node: Node, segment: &[u8]) -> Option<Node> {
        self.edge(node, segment)
    }

    /// What hangs at an exact host.
    pub(crate) fn exact_host(&self, host: &[u8]) -> Option<u32> {
        self.edge(EXACT_HOST, host)
    }

    /// What hangs at a suffix; it begins with a dot.
    pub(crate) fn suffix_host(&self, suffix: &[u8]) -> Option<u32> {
        self.edge(SUFFIX_HOST, suffix)
    }

    /// Candidates in order of rank.
    #[inline]
    pub(crate) fn candidates(&self, node: Node, list: List) -> &[Rank] {
        let lists = self.nodes[node as usize];
        let (start, end) = match list {
            List::Exact => (lists.exact, lists.elements),
            List::Prefix => (lists.elements, lists.end),
        };
        &self.ranks[start as usize..end as usize]
    }

    /// The nodes of the string prefixes that end inside the segment at the start of `rest`, longest first.
    pub(crate) fn inside<'a>(&'a self, node: Node, rest: &'a [u8]) -> impl Iterator<Item = Node> + 'a {
        let start = self.nodes[node as usize].lengths;
        let lengths = if start == NO_LENGTHS { &[] } else { &self.lengths[start as usize..] };
        lengths
            .iter()
            .take_while(|&&kept| kept != LENGTHS_END)
            .filter_map(move |kept| rest.get(..*kept as usize - 1))
            .filter_map(move |text| self.edge(node | INSIDE, text))
    }

    /// Bytes on the heap.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.edges.allocation_size()
            + self.texts.len()
            + size_of_val(&*self.nodes)
            + size_of_val(&*self.ranks)
            + size_of_val(&*self.lengths)
    }
}

/// An index in the making.
pub(crate) struct IndexBuilder {
    hash: RandomState,
    edges: HashTable<Edge>,
    texts: Vec<u8>,
    /// Segments recur under many nodes: one copy of each.
    interned: HashTable<(u32, u32)>,
    node_count: u32,
    candidates: Vec<(Node, List, Rank)>,
    lengths: Vec<(Node, u32)>,
}

impl IndexBuilder {
    pub(crate) fn new() -> Self {
        IndexBuilder {
            hash: RandomState::default(),
            edges: HashTable::new(),
            texts: Vec::new(),
            interned: HashTable::new(),
            node_count: 0,
            candidates: Vec::new(),
            lengths: Vec::new(),
        }
    }

    /// A new root.
    pub(crate) fn root(&mut self) -> Node {
        self.node_count += 1;
        self.node_count - 1
    }

    fn intern(&mut self, text: &[u8]) -> u32 {
        let hash = hash_of(&self.hash, 0, text);
        if let Some(&(start, _)) = self.interned.find(hash, |&(start, len)| text_of(&self.texts, start, len) == text) {
            return start;
        }
        let start = self.texts.len() as u32;
        self.texts.extend_from_slice(text);
        let (seed, texts) = (&self.hash, &self.texts);
        self.interned.insert_unique(hash, (start, text.len() as u32), |&(start, len)| hash_of(seed, 0, text_of(texts, start, len)));
        start
    }

    /// The child at `text`, made by `make` if it is not there.
    fn edge(&mut self, parent: u32, text: &[u8], make: impl FnOnce(&mut Self) -> u32) -> u32 {
        let hash = hash_of(&self.hash, parent, text);
        let same = |edge: &Edge| edge.parent == parent && text_of(&self.texts, edge.text, edge.len) == text;
        if let Some(edge) = self.edges.find(hash, same) {
            return edge.child;
        }
        let child = make(self);
        let edge = Edge { parent, child, text: self.intern(text), len: text.len() as u32 };
        let (seed, texts) = (&self.hash, &self.texts);
        self.edges.insert_unique(hash, edge, |edge| hash_of(seed, edge.parent, text_of(texts, edge.text, edge.len)));
        child
    }

    /// The number kept at an exact host, `fresh` if the host is new.
    pub(crate) fn exact_host(&mut self, host: &[u8], fresh: u32) -> u32 {
        self.edge(EXACT_HOST, host, |_| fresh)
    }

    /// The number kept at a suffix, `fresh` if the suffix is new.
    pub(crate) fn suffix_host(&mut self, suffix: &[u8], fresh: u32) -> u32 {
        self.edge(SUFFIX_HOST, suffix, |_| fresh)
    }

    /// The node after all segments of `path`, which begins with `/`.
    fn descend(&mut self, root: Node, path: &str) -> Node {
        path.as_bytes()[1..].split(|&b| b == b'/').fold(root, |node, segment| self.edge(node, segment, IndexBuilder::root))
    }

    /// The path is exactly this.
    pub(crate) fn add_exact(&mut self, root: Node, path: &str, rank: Rank) {
        let node = self.descend(root, path);
        self.candidates.push((node, List::Exact, rank));
    }

    /// The path begins with these elements. A trailing `/` is ignored, so `/` is every path.
    pub(crate) fn add_element_prefix(&mut self, root: Node, path: &str, rank: Rank) {
        let path = path.strip_suffix('/').unwrap_or(path);
        let node = if path.is_empty() { root } else { self.descend(root, path) };
        self.candidates.push((node, List::Prefix, rank));
    }

    /// The path begins with this text.
    pub(crate) fn add_string_prefix(&mut self, root: Node, prefix: &str, rank: Rank) {
        let cut = prefix.rfind('/').unwrap_or_default();
        let (whole, inside) = (&prefix[..cut], &prefix.as_bytes()[cut + 1..]);
        let node = if whole.is_empty() { root } else { self.descend(root, whole) };
        let end = self.edge(node | INSIDE, inside, IndexBuilder::root);
        self.lengths.push((node, inside.len() as u32 + 1));
        self.candidates.push((end, List::Prefix, rank));
    }

    pub(crate) fn finish(mut self) -> Index {
        self.candidates.sort_unstable();
        self.lengths.sort_unstable_by_key(|&(node, length)| (node, std::cmp::Reverse(length)));
        self.lengths.dedup();
        let mut nodes = Vec::with_capacity(self.node_count as usize);
        let mut lengths = Vec::with_capacity(self.lengths.len());
        let (mut candidate, mut length) = (0usize, 0usize);
        let count = |from: usize, test: &dyn Fn(&(Node, List, Rank)) -> bool| {
            self.candidates[from..].iter().take_while(|candidate| test(candidate)).count()
        };
        for node in 0..self.node_count {
            let elements = candidate + count(candidate, &|c| c.0 == node && c.1 == List::Exact);
            let end = elements + count(elements, &|c| c.0 == node);
            let first_length = lengths.len() as u32;
            while let Some(&(_, kept)) = self.lengths.get(length).filter(|(owner, _)| *owner == node) {
                lengths.push(kept);
                length += 1;
            }
            let has_lengths = lengths.len() as u32 > first_length;
            if has_lengths {
                lengths.push(LENGTHS_END);
            }
            let kept = if has_lengths { first_length } else { NO_LENGTHS };
            nodes.push(Lists { exact: candidate as u32, elements: elements as u32, end: end as u32, lengths: kept });
            candidate = end;
        }
        let (seed, texts) = (&self.hash, &self.texts);
        self.edges.shrink_to_fit(|edge| hash_of(seed, edge.parent, text_of(texts, edge.text, edge.len)));
        Index {
            hash: self.hash,
            edges: self.edges,
            texts: self.texts.into(),
            nodes: nodes.into(),
            ranks: self.candidates.iter().map(|&(_, _, rank)| rank).collect(),
            lengths: lengths.into(),
        }
    }
}
