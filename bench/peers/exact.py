"""The gated delta rule in fp64, to judge by: token by token, and the same in chunks for long sequences. Differentiable.
q and k [B, T, H, K], normalised and repeated to the heads of v [B, T, H, V]; g, beta [B, T, H]; state [B, H, K, V]."""

import torch


def by_tokens(q, k, v, g, beta, s):
    o = []
    for t in range(q.shape[1]):
        s = g[:, t, :, None, None].exp() * s
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t]))
        s = s + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        o.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]) * q.shape[-1] ** -0.5)
    return torch.stack(o, 1), s


def by_chunks(q, k, v, g, beta, s, size=64):
    """U solves (I + strict_lower(beta K K^T decay)) U = beta (V - decay K S), chunk after chunk."""
    o = []
    for at in range(0, q.shape[1], size):
        Q, K, V, G, B = (x[:, at : at + size].transpose(1, 2) for x in (q, k, v, g, beta))
        G = G.cumsum(-1)
        ahead = torch.ones(G.shape[-1], G.shape[-1], dtype=torch.bool, device=q.device).triu(1)
        decay = (G[..., :, None] - G[..., None, :]).masked_fill(ahead, -torch.inf).exp()
        system = B[..., None] * decay * (K @ K.transpose(-1, -2))
        right = B[..., None] * (V - G.exp()[..., None] * (K @ s))
        U = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        O = G.exp()[..., None] * (Q @ s) + (decay * (Q @ K.transpose(-1, -2))) @ U
        o.append(O.transpose(1, 2) * q.shape[-1] ** -0.5)
        s = G[..., -1:, None].exp() * s + (K * (G[..., -1:] - G).exp()[..., None]).transpose(-1, -2) @ U
    return torch.cat(o, 1), s


def normalised(x, eps=1e-6):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def error(x, truth):
    """Relative L2 of the worst sequence and head; x and truth [B, T, H, D], [B, T, H], or states [B, H, K, V]."""
    x, truth = (t.double().unsqueeze(-1) if t.dim() == 3 else t.double() for t in (x, truth))
    return ((x - truth).norm(dim=(1, 3)) / truth.norm(dim=(1, 3)).clamp_min(1e-30)).max().item()


def state_error(x, truth):
    return ((x.double() - truth).norm(dim=(2, 3)) / truth.norm(dim=(2, 3)).clamp_min(1e-30)).max().item()
