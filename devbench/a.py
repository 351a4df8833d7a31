import torch, timm, time, sys
import torch.nn.functional as F
import interlayer
from torch.profiler import profile, ProfilerActivity
torch.backends.cudnn.benchmark = False
def bench(f, n=20):
    for _ in range(3): f()
    torch.cuda.synchronize(); s=torch.cuda.Event(True); e=torch.cuda.Event(True); s.record()
    for _ in range(n): f()
    e.record(); torch.cuda.synchronize(); return s.elapsed_time(e)/n
# depthwise conv variants, bf16, channels_last
print('dwconv fwd / fwd+bwd ms')
for C,H in [(256,56),(512,28),(1024,14),(2048,7)]:
    x=torch.randn(256,C,H,H,device='cuda',dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last).requires_grad_()
    w=torch.randn(C,1,3,3,device='cuda',dtype=torch.bfloat16,requires_grad=True)
    g=torch.randn_like(x)
    def cl(x=x): return F.conv2d(x,w,padding=1,groups=C)
    def nchw(x=x): return F.conv2d(x.contiguous(),w,padding=1,groups=C).contiguous(memory_format=torch.channels_last)
    def shift(x=x):
        p=F.pad(x,(1,1,1,1)); o=None
        for i in range(3):
            for j in range(3):
                t=w[:,0,i,j][None,:,None,None]; s=p[:,:,i:i+H,j:j+H]
                o = s*t if o is None else torch.addcmul(o,s,t)
        return o
    comp=torch.compile(shift)
    for nm,f in [('channels_last',cl),('via nchw',nchw),('shift compiled',comp)]:
        for b in (False,True):
            torch.backends.cudnn.benchmark=b
            if nm=='shift compiled' and b: continue
            fw=bench(lambda: f())
            def fb(): 
                o=f(); torch.autograd.grad(o,(x,w),g)
            print(C,H,nm,'bench' if b else '', f'{fw:.3f} {bench(fb):.3f}', flush=True)
    with torch.backends.cudnn.flags(enabled=False):
        try:
            fw=bench(nchw); 
            def fb(): o=nchw(); torch.autograd.grad(o,(x,w),g)
            print(C,H,'native nchw', f'{fw:.3f} {bench(fb):.3f}',flush=True)
            fw=bench(cl)
            def fb(): o=cl(); torch.autograd.grad(o,(x,w),g)
            print(C,H,'native cl', f'{fw:.3f} {bench(fb):.3f}',flush=True)
        except Exception as ex: print('native fail', ex)
torch.backends.cudnn.benchmark=False
for n in ('resnet50_mrla_light','resnet50_mrla_base'):
    m=timm.create_model(n).cuda().to(memory_format=torch.channels_last).train()
    x=torch.randn(256,3,224,224,device='cuda').to(memory_format=torch.channels_last)
    def step():
        with torch.autocast('cuda',torch.bfloat16): l=m(x).float().square().mean()
        l.backward()
    for _ in range(3): step()
    with profile(activities=[ProfilerActivity.CUDA,ProfilerActivity.CPU]) as p:
        step(); torch.cuda.synchronize()
    print(n); print(p.key_averages().table(sort_by='self_cuda_time_total',row_limit=28,max_name_column_width=70)[:9000])
    del m,x
